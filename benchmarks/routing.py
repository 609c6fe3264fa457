"""Commands to one hot entity that arrive at four servers, and callers while servers die.

Each server is a process with its own door. ``routed``, ``scattered`` and ``direct`` have the same
number of callers: coroutines in the servers, as requests are, spread over all servers or all at the
leader. A handler takes 0.2 ms of CPU time. The callers of ``healthy`` and ``failover`` are threads
of one process that call many entities over HTTP; the servers are killed one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from .entities import threaded

ASKED = {
    "routed_vs_scattered": "at least 1",
    "conflicts_routed_vs_scattered": "at most 0.1",
    "routed_vs_direct": "at least 0.5",
    "failover_vs_healthy": "at least 0.6",
    "errors_of_callers": "0",
}
SERVERS = 4
#: Callers of the hot entity in all servers together; threads that call over HTTP; their entities.
CALLERS, THREADS, ENTITIES = 256, 8, 64
#: Makes the command ids of one run unique.
_numbers = count()


class Servers:
    """Forks of this process. Each reads orders from a pipe, line by line, and writes results."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._pipes: dict[int, tuple[Any, Any]] = {}
        self.pids: dict[int, int] = {}
        for number in range(SERVERS):
            self.start(number)

    def start(self, number: int, port: int = 0) -> None:
        from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler

        tells, says = os.pipe(), os.pipe()
        port = self.ports[number] if number < len(self.ports) else 0
        server = ThreadedWSGIServer(("127.0.0.1", port), WSGIRequestHandler)
        if not port:
            self.ports.append(server.server_port)
        pid = os.fork()
        if not pid:
            try:
                with os.fdopen(tells[0]) as told, os.fdopen(says[1], "w") as said:
                    serve(server, told, said)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        server.socket.close()
        os.close(tells[0])
        os.close(says[1])
        self.pids[number] = pid
        self._pipes[number] = os.fdopen(tells[1], "w"), os.fdopen(says[0])

    @property
    def urls(self) -> list[str]:
        return [url(port) for port in self.ports]

    def tell(self, *told: Any) -> list[Any]:
        """Send each server its order, all at once; return their results."""
        for (out, _), each in zip(self._pipes.values(), told, strict=True):
            print(json.dumps(each), file=out, flush=True)
        return [json.loads(said.readline()) for _, said in self._pipes.values()]

    def kill(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGKILL)
        os.waitpid(self.pids.pop(number), 0)
        for each in self._pipes.pop(number):
            with suppress(OSError):
                each.close()

    def end(self) -> None:
        for number in list(self.pids):
            self.kill(number)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/outbox/"


def serve(server: Any, told: Any, said: Any) -> None:
    """Serve the door, and for each order let callers of this process call the hot entity."""
    import logging

    from django.core.handlers.wsgi import WSGIHandler

    logging.disable(logging.WARNING)
    be_server(url(server.server_port), [])
    server.set_app(WSGIHandler())
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    for line in told:
        leads, callers, seconds = json.loads(line)
        be_server(url(server.server_port), leads)
        print(json.dumps(asked(callers, seconds)), file=said, flush=True)


def be_server(address: str, leads: list[str]) -> None:
    """Set the settings of a server. Without leaders, commands are executed where they arrive."""
    given = {"SERVICE": "shop", "ADDRESS": address, "TOPOLOGY": leads or None}
    fellows = {"direction": "both", "address": "service:shop", "keys": keys("fellows")}
    callers = {"direction": "sender", "address": address, "commands": ["*"], "keys": keys("web")}
    configure(FLEET=given, PEERS={"shop": fellows, "web": callers})


def configure(**given: Any) -> None:
    from django.conf import settings
    from django.core.signals import setting_changed

    settings.OUTBOX = {**settings.OUTBOX, **given}
    setting_changed.send(None, setting="OUTBOX", value=settings.OUTBOX, enter=True)


def keys(name: str) -> list[dict[str, str]]:
    return [{"id": name, "secret": "env:BENCHMARK_SECRET"}]


def asked(callers: int, seconds: float) -> dict[str, Any]:
    """Let coroutines call the hot entity and wait for answers; return times and conflicts."""
    from .models import Hot

    took: list[float] = []
    before = conflicts()

    async def ask(end: float) -> None:
        while (began := time.perf_counter()) < end:
            name = f"{os.getpid()}-{next(_numbers)}"
            await Hot.aexecute("hot", "work", {}, command_id=name, timeout=60)
            took.append(time.perf_counter() - began)

    async def all_callers() -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(ask(end) for _ in range(callers)))

    begin, cpu = time.perf_counter(), time.process_time()
    asyncio.run(all_callers())
    lasted, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"took": took, "seconds": lasted, "cpu": cpu, "conflicts": conflicts() - before}


def conflicts() -> float:
    """Return how many attempts beyond the first the batches of this process have made."""
    from outbox_app.entities.series import CONFLICTS
    from outbox_app.process import counters

    minutes = [
        minute
        for each in list(counters._shared.values())
        for sources in each._minutes.values()
        for minute in sources.values()
    ]
    return sum(m.values.get((CONFLICTS, "", ""), 0) for m in minutes)


def contest(servers: Servers, leads: list[str], callers: list[int], seconds: float) -> Any:
    """Let ``callers[n]`` callers call from server n, and return the measurements."""
    found = servers.tell(*([leads, each, seconds] for each in callers))
    took = [each for one in found for each in one["took"]]
    cuts = statistics.quantiles(took, n=100)
    return {
        "per_second": len(took) / max(each["seconds"] for each in found),
        "p50": cuts[49],
        "p99": cuts[98],
        "conflicts": sum(each["conflicts"] for each in found) / len(took),
        # CPU seconds per command, by server: which server is busy, and with how much overhead.
        "cpu_per_command": [each["cpu"] / len(took) for each in found],
    }


def leader(urls: list[str]) -> int:
    """Return the number of the server that leads the hot entity."""
    from outbox_app.events.log.newevent import slice_of
    from outbox_app.fleet.topology import leaders_of

    configure(FLEET={"SERVICE": "shop", "TOPOLOGY": urls})
    return urls.index(leaders_of(())[slice_of("hot")])


def over_http(seconds: float, errors: list[str]) -> float:
    """Return the calls per second of threads that call any server that answers."""
    from outbox_app.entities import service
    from outbox_app.exceptions import OutboxError

    shop = service("shop")

    def ask(name: str, number: int) -> None:
        id, command_id = f"e{next(_numbers) % ENTITIES}", f"{os.getpid()}-{next(_numbers)}"
        try:
            shop.execute("benchmarks.hot", id, "add", {"amount": 1}, command_id=command_id)
        except OutboxError as error:
            errors.append(repr(error))

    return threaded(ask, seconds, THREADS)["per_second"]


@contextmanager
def ready() -> Iterator[Servers]:
    """Create the entities, and run four servers."""
    from django.db import connection

    from outbox_app.entities import Command

    from .models import Hot

    os.environ["BENCHMARK_SECRET"] = secrets.token_hex(32)
    Hot.execute("hot", "open", command_id="open")
    Hot.execute_many([Command(f"e{n}", "open", command_id="open") for n in range(ENTITIES)])
    connection.close()
    Hot.routed = True
    servers = Servers()
    try:
        yield servers
    finally:
        Hot.routed = False
        servers.end()


def compare(*, quick: bool, scale: float) -> dict[str, Any]:
    """Run the rounds; returns ``ratios`` and ``rounds``."""
    rounds, seconds = (3, 1.0) if quick else (15, 1.0)
    if scale < 1:
        rounds, seconds = 1, max(0.2, seconds * scale)
    found: list[dict[str, Any]] = []
    errors: list[str] = []
    with ready() as servers:
        first = leader(servers.urls)
        spread = [CALLERS // SERVERS] * SERVERS
        alone = [CALLERS * (number == first) for number in range(SERVERS)]
        contests = {
            "routed": (servers.urls, spread),
            "scattered": ([], spread),
            "direct": (servers.urls, alone),
        }
        for number in range(rounds + 1):  # in turns, in reverse order every second round
            names = list(contests)[:: -1 if number % 2 else 1]
            turn = {name: contest(servers, *contests[name], seconds) for name in names}
            if number:  # round 0 warms up
                found.append(turn)
        found_http = with_failures(
            servers, seconds, max(rounds, SERVERS if scale >= 1 else 1), errors
        )

    def ratio(what: Callable[[Any], float]) -> float:
        return round(statistics.median(map(what, found)), 4)

    scattered = statistics.median(each["scattered"]["conflicts"] for each in found)
    routed = statistics.median(each["routed"]["conflicts"] for each in found)
    return {
        "ratios": {
            "routed_vs_scattered": ratio(
                lambda r: r["routed"]["per_second"] / r["scattered"]["per_second"]
            ),
            "conflicts_routed_vs_scattered": round(routed / scattered, 4) if scattered else 0.0,
            "routed_vs_direct": ratio(
                lambda r: r["routed"]["per_second"] / r["direct"]["per_second"]
            ),
            "failover_vs_healthy": round(
                statistics.median(each["failover"] / each["healthy"] for each in found_http), 4
            ),
            "errors_of_callers": len(errors),
        },
        "rounds": found,
        "killed": found_http,
        "errors": errors[:10],
    }


def with_failures(
    servers: Servers, seconds: float, rounds: int, errors: list[str]
) -> list[dict[str, float]]:
    """Kill one server in each round, in turn; return the rates before and after each kill."""
    found = []
    for number in range(rounds):
        peer = {"direction": "keeper", "address": "service:shop", "keys": keys("web")}
        static = {
            "REGISTRY": "outbox_app.fleet.registries.StaticRegistry",
            "SERVERS": {"shop": servers.urls},
            "DEADLINE": 10.0,  # twice the default: the machine may be busy
        }
        configure(FLEET=static, PEERS={"shop": peer})
        over_http(seconds / 4, errors)
        healthy = over_http(seconds, errors)
        servers.kill(number % SERVERS)
        found.append({"healthy": healthy, "failover": over_http(seconds, errors)})
        servers.start(number % SERVERS)
    return found
