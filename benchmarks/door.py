"""Commands to one hot entity of another service: one by one, in batches, beside an unsigned view.

The service is gunicorn with two workers of 16 threads; the callers are threads of one process, on
the same machine. Contestants take turns. ``unsigned`` is what a project would write by hand: a view
that executes the command, called over connections that are kept, without signatures.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import django

from .entities import median, threaded
from .losses import scratch_database
from .routing import configure

ASKED = {
    "batches_vs_one_by_one": "at least 7.5",
    "one_by_one_vs_unsigned": "",
    "batches_per_second": "at least 3000",
    "one_by_one_per_second": "at least 400",
}
WORKERS, THREADS = 2, 16
#: Threads that call one by one; threads that send batches; commands of a batch.
CALLERS, SENDERS, BATCH = 24, 4, 100
#: Makes the keys of one run unique.
_numbers = count()


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Args:
        quick: Fewer and shorter rounds.
        scale: Fraction of the time, in a single round.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds``: commands per second of each
        contestant, and the seconds of CPU that a command takes in the callers' process.
    """
    port, peers = register_peers()
    django.setup()
    configure(FLEET={"DEADLINE": 60.0})  # twelve times the default: the machine may be busy
    seconds, rounds = (2.0, 3) if quick else (5.0, 7)
    if scale < 1:
        rounds = 1
    found: list[dict[str, Any]] = []
    with scratch_database(), served(port, peers):
        contests: dict[str, Callable[[float], Any]] = {
            "one_by_one": lambda s: called(one, s, CALLERS),
            "batches": lambda s: called(many, s, SENDERS, BATCH),
            "unsigned": lambda s: called(Unsigned(port), s, CALLERS),  # with connections of its own
        }
        for number in range(rounds + 1):  # in alternating order: a contestant may affect the next
            order = list(contests)[:: -1 if number % 2 else 1]
            turn = {name: contests[name](seconds * scale) for name in order}
            if number:  # round 0 warms up
                found.append(turn)

    def ratio(name: str, to: str) -> float:
        return round(median(found, lambda r: r[name]["per_second"] / r[to]["per_second"]), 4)

    def rate(name: str) -> float:
        return round(median(found, lambda r: r[name]["per_second"]), 1)

    ratios = {
        "batches_vs_one_by_one": ratio("batches", "one_by_one"),
        "one_by_one_vs_unsigned": ratio("one_by_one", "unsigned"),
        "batches_per_second": rate("batches"),
        "one_by_one_per_second": rate("one_by_one"),
    }
    return {"ratios": ratios, "asked": ASKED, "rounds": found}


def called(ask: Any, seconds: float, threads: int, each: int = 1) -> dict[str, float]:
    cpu = time.process_time()
    found = threaded(ask, seconds, threads)
    rate = found["per_second"] * each
    return {"per_second": rate, "cpu": (time.process_time() - cpu) / (rate * seconds)}


def one(name: str, number: int) -> None:
    from outbox_app.entities import service

    key = f"{os.getpid()}-{next(_numbers)}"
    service("shop").execute("benchmarks.hot", "hot", "add", {"amount": 1}, command_id=key)


def many(name: str, number: int) -> None:
    from outbox_app.entities import Command, service

    key = f"{os.getpid()}-{next(_numbers)}"
    asked = [Command("hot", "add", {"amount": 1}, command_id=f"{key}-{n}") for n in range(BATCH)]
    service("shop").execute_many("benchmarks.hot", asked)


class Unsigned:
    """Calls the view of ``benchmarks.urls``; each thread keeps its connection."""

    def __init__(self, port: int) -> None:
        self.port, self.own = port, threading.local()

    def __call__(self, name: str, number: int) -> None:
        if not hasattr(self.own, "connection"):
            self.own.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        path, body = f"/hot/{os.getpid()}-{next(_numbers)}", json.dumps({"amount": 1})
        self.own.connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = self.own.connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()


def register_peers() -> tuple[int, str]:
    """Make the service a peer of this process. Return its port, and the peers that it must have."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["BENCHMARK_SECRET"] = secrets.token_hex(32)
    peer = {
        "address": f"http://127.0.0.1:{port}/outbox/",
        "keys": [{"id": "benchmark", "secret": "env:BENCHMARK_SECRET"}],
    }
    os.environ["BENCHMARK_PEERS"] = json.dumps({"shop": peer | {"direction": "keeper"}})
    return port, json.dumps({"web": peer | {"direction": "sender", "commands": ["*"]}})


@contextmanager
def served(port: int, peers: str) -> Iterator[None]:
    """Create the entity, and serve it by gunicorn."""
    from django.db import connection

    from .models import Hot

    Hot.execute("hot", "open", command_id="open")
    url = os.environ["BENCHMARK_URL"].rpartition("/")[0] + "/" + connection.settings_dict["NAME"]
    connection.close()
    command = [sys.executable, "-m", "gunicorn", "--workers", str(WORKERS), "--threads"]
    command += [str(THREADS), "--worker-class", "gthread", "--bind", f"127.0.0.1:{port}"]
    server = subprocess.Popen(
        [*command, "django.core.wsgi:get_wsgi_application()"],
        env={**os.environ, "BENCHMARK_URL": url, "BENCHMARK_PEERS": peers},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait()
