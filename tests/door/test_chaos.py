"""Two projects under chaos: what is published is what was committed, each event once.

Payers, doors and check-backs are killed and stopped; the database servers of both projects are
killed and restarted; all four connections (to each door, to each database) are cut, refused, or
drop all bytes, for longer than any process waits. ``PREPARED_CHAOS=100000`` sets the number of
events (default: 300).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from outbox_app.capability import capabilities
from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Event
from outbox_app.models import Incident
from outbox_app.prepared.models import Fence, PreparedEvent
from tests import forking
from tests.faults.tools import ROOT, alias_for
from tests.patience import eventually, patience
from tests.servers import PostgreSQL, Proxy, processes
from tests.servers.base import Server
from tests.servers.mysql import MARIADB, MARIADB_SERVER

from . import paying

COUNT = int(os.environ.get("PREPARED_CHAOS", 300))
#: Events of one transaction, at most.
MOST = min(50, max(5, COUNT // 500))
#: Faults, which are spread over the events, and of which two may happen at a time.
FAULTS, LANES = min(200, max(10, COUNT // 50)), 2
pytestmark = pytest.mark.timeout(180 + COUNT // 50)


class World:
    """The processes, servers and connections of both projects, and what may happen to them."""

    def __init__(self, begun: Path) -> None:
        self.log = begun
        #: Of a call and of a lease; of faults, some of which are longer.
        self.seconds = min(patience(1.0), 4.0)
        self.short, self.long = 0.3, 1.5 * self.seconds
        self.databases: dict[str, Any] = {}
        self.links: dict[str, Proxy] = {}
        self.running: dict[str, Any] = {}
        self.start: dict[str, Callable[[], Any]] = {}
        self.happened: Counter[str] = Counter()
        self._numbers = iter(range(FAULTS))
        self._round: list[tuple[str, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._end = threading.Event()
        self._error: BaseException | None = None

    def begin(self) -> None:
        self.running.update({name: start() for name, start in self.start.items()})

    def begun(self) -> int:
        """Return of how many events the transactions were begun."""
        return sum(map(int, self.log.read_text().split())) if self.log.exists() else 0

    def faults(self) -> list[tuple[str, Callable[[], None]]]:
        """Return each one there is; where there will be few, one of what happens to each thing."""
        found: dict[str, list[tuple[str, Callable[[], None]]]] = {}
        for name, link in self.links.items():
            found[name] = [("cut", link.cut)]
            for mode, seconds in (
                ("refuse", self.short),
                ("cut_on_reply", self.short),
                ("drop_reply", self.long),
                ("blackhole", self.long),
            ):
                found[name].append((mode, partial(self._spoil, link, mode, seconds)))
        for name in self.start:
            found[name] = [
                ("killed", partial(self._kill, name)),
                ("one of its processes killed", partial(self._kill_one, name)),
                ("stopped", partial(self._stop, lambda name=name: self.running[name].pid)),
            ]
        for name, server in self.databases.items():
            found[name] = [
                ("killed", partial(self._restart, server)),
                ("stopped", partial(self._stop, lambda server=server: server.pid)),
            ]
        many = FAULTS > 30
        faults = [
            (f"{name}: {what}", happens)
            for name, all_of_it in found.items()
            for what, happens in (all_of_it if many else [random.choice(all_of_it)])
        ]
        return random.sample(faults, len(faults))

    def _spoil(self, link: Proxy, mode: Any, seconds: float) -> None:
        link.mode = mode
        self._end.wait(seconds)
        link.mode = "pass"
        link.cut()

    def _kill(self, name: str) -> None:
        self.end(self.running[name])
        self.running[name] = self.start[name]()

    def end(self, process: Any) -> None:
        processes.kill_trees([process.pid])
        process.wait()
        processes.forget_process(process.pid)

    def _kill_one(self, name: str) -> None:
        """A worker, which its parent replaces."""
        if children := processes.process_tree(self.running[name].pid)[1:]:
            processes.kill_trees([random.choice(children)])

    def _stop(self, pid: Callable[[], int]) -> None:
        stopped = pid()
        processes.stop_tree(stopped)
        self._end.wait(self.long)
        processes.continue_tree(stopped)

    def _restart(self, server: Any) -> None:
        server.kill()
        server.start()

    @contextmanager
    def happening(self) -> Iterator[None]:
        """Faults, until the block is left; then none."""
        lanes = [threading.Thread(target=self._lane, daemon=True) for _ in range(LANES)]
        for lane in lanes:
            lane.start()
        try:
            yield
        finally:
            self._end.set()
            for lane in lanes:
                lane.join(patience())
        assert not self._error, self._error
        assert not any(lane.is_alive() for lane in lanes)

    def _lane(self) -> None:
        for number in self._numbers:
            while self.begun() < number * COUNT / FAULTS:
                if self._end.wait(0.05):
                    return
            with self._lock:
                self._round = self._round or self.faults()
                name, happens = self._round.pop()
            try:
                with self._locks[name.partition(":")[0]]:
                    happens()
            except BaseException as error:
                self._error = error
                return
            self.happened[name] += 1

    def is_through(self) -> bool:
        """Say whether enough was paid, and has happened; raise what has ended by itself."""
        assert not self._error, self._error
        for name, process in self.running.items():
            assert process.poll() in (None, -signal.SIGKILL), name
        return self.begun() >= COUNT and self.happened.total() == FAULTS


@pytest.fixture
def sender() -> str:
    """The alias of billing. The shop has the other alias."""
    return random.choice([MARIADB, "postgres"])


@pytest.fixture
def world(
    sender: str,
    variables: Any,
    peers: dict[str, Any],
    ports: dict[str, int],
    tmp_path: Path,
    django_db_blocker: Any,
) -> Iterator[World]:
    """One project has a PostgreSQL, the other a MariaDB; each of four links has a proxy."""
    made = World(tmp_path / "begun")
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())
        environments = {}
        outbox = {"LEASE_SECONDS": made.seconds, "PUBLISH_TIMEOUT": made.seconds / 2}
        all_kinds = {"postgres": PostgreSQL, MARIADB: MARIADB_SERVER}
        [keeper] = all_kinds.keys() - {sender}
        kinds = {
            project: (a, all_kinds[a]) for project, a in (("shop", keeper), ("billing", sender))
        }
        for project, (_, kind) in kinds.items():
            made.databases[f"{project}'s server"] = server = kind()
            stack.callback(server.close)
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.start, made.databases.values()))
        for (project, (alias, _)), server in zip(
            kinds.items(), made.databases.values(), strict=True
        ):
            link = stack.enter_context(Proxy("127.0.0.1", server.port))
            environments[project] = {
                f"{alias.upper()}_URL": server.url.replace(f":{server.port}", f":{link.port}")
            }
            made.links[f"{project}'s database"] = link
        for asked, asks in (("shop", "billing"), ("billing", "shop")):
            link = stack.enter_context(Proxy("127.0.0.1", ports[asked]))
            peers[asks][asked]["address"] = f"http://127.0.0.1:{link.port}/outbox/"
            made.links[f"{asked}'s door"] = link

        for project, (alias, _) in kinds.items():
            environments[project] = {
                **variables(project, alias),
                **environments[project],
                "DOOR_OUTBOX": json.dumps(outbox),
                "DOOR_BACKOFF": "0.5",
                "DOOR_SECONDS": str(made.seconds),
            }

        def start(name: str, project: str, *command: str) -> Any:
            return processes.spawn(
                [sys.executable, "-m", *command],
                log=tmp_path / f"{name}.log",
                folder=ROOT,
                environment=environments[project],
                user=None,
                popen=forking.Popen,
            )

        for project in kinds:
            command = ["gunicorn", "--preload", "--worker-class", "gthread", "--threads", "4"]
            command += ["--bind", f"127.0.0.1:{ports[project]}", "tests.door.project:application"]
            made.start[f"{project}'s gunicorn"] = partial(start, project, project, *command)
        made.start["check-back"] = partial(start, "asking", "shop", "tests.door.paying", "ask")
        pays = ["tests.door.paying", "pay", sender, str(MOST), str(tmp_path)]
        made.start["payers"] = partial(start, "paying", "billing", *pays)
        try:
            yield made
        finally:
            for process in made.running.values():
                made.end(process)


def test_published_is_what_was_committed(world: World, tmp_path: Path) -> None:
    shop, billing = (alias_for(server.url) for server in world.databases.values())
    with shop as keeper, billing as sender:
        for alias in (keeper, sender):
            for app in capabilities():
                if app.models_module:
                    call_command("migrate", app.label, database=alias, verbosity=0)
        with connections[sender].cursor() as cursor:
            cursor.execute(paying.TABLE)
        for alias in (keeper, sender):
            connections[alias].close()
        begin = time.monotonic()
        world.begin()
        eventually(world.begun, "the first payment")
        with world.happening():
            while not world.is_through():
                time.sleep(0.2)
            (tmp_path / "stop").touch()
        eventually(lambda: world.running["payers"].poll() == 0, "the last payment")
        seconds = time.monotonic() - begin
        rows = PreparedEvent.objects.using(keeper)
        assert not rows.filter(state="undecided").exists()
        while rows.open().exists():
            rows.open().update(next_check_at=DatabaseNow())  # claims of the killed are over
            until = time.monotonic() + 5
            while rows.open().exists() and time.monotonic() < until:
                time.sleep(0.1)
                assert world.running["check-back"].poll() is None
        with connections[sender].cursor() as cursor:
            cursor.execute("SELECT event_id FROM door_paid")
            committed = {id for (id,) in cursor.fetchall()}
        published = [
            str(id) for id in Event.objects.using(keeper).values_list("message_id", flat=True)
        ]
        fenced = Fence.objects.using(sender).filter(outcome="committed")
        found = {
            "lost": len(committed - set(published)),
            "leaked": len(set(published) - committed),
            "twice": len(published) - len(set(published)),
            "undecided": rows.open().count(),
        }
        print(f"\nsender={connections[sender].vendor} events={world.begun()} {found}")
        print(f"committed={len(committed)} seconds={seconds:.0f}")
        print(*(f"{count} {name}" for name, count in sorted(world.happened.items())), sep=", ")
        assert set(found.values()) == {0}
        assert {str(id) for id in fenced.values_list("pk", flat=True)} == committed
        assert not Incident.objects.using(keeper).exists()
        assert 0 < len(committed) < world.begun()
