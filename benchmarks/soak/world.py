"""The world of one soak: private servers, proxies in front of them, and restarted processes.

A process that ends is started again. A process that stopped itself at a failpoint is continued
after twice the lease. When the block ends, all processes are ended by their ids.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests import forking
from tests.servers import MariaDB, MySQL, PostgreSQL, Proxy, RabbitMQ, Redis, processes

from .consumer import TABLES, connect

ROOT = Path(__file__).resolve().parents[2]
DATABASES = {"postgres": PostgreSQL, "mariadb": MariaDB, "mysql": MySQL}
BROKERS = {
    "redis": lambda: Redis(extra_arguments=("--appendonly", "yes", "--appendfsync", "always")),
    "rabbitmq": RabbitMQ,
}
LEASE_SECONDS = 4.0
#: The failpoints in the code of each kind of process, for ``OUTBOX_FAILPOINT``.
FAILPOINTS = {
    "drainer": ("claimed", "checked", "published_not_deleted", "deleted"),
    "subscriptions": ("page_read", "advanced", "handled", "committed"),
    "writer": ("immediate_claimed", "immediate_published", "immediate_deleted"),
}


class Program:
    """One process, which is started again whenever it has ended.

    Args:
        kind: "writer", "drainer", "subscriptions", "consumer" or "worker".
        name: The unique name of the process.
        world: The world that it belongs to.
    """

    def __init__(self, kind: str, name: str, world: World) -> None:
        self.kind = kind
        self.name = name
        self.world = world
        self.starts = 0
        self.popen: Any = None
        self.failpoint = ""
        self._frozen_since = 0.0

    @property
    def log(self) -> Path:
        return self.world.folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        """Start the process, with ``failpoint`` if it is set."""
        self.starts += 1
        environment = self.world.environment(direct=self.kind in ("consumer", "worker"))
        if self.kind == "writer" and self.starts % 2:  # MySQL's own default, unlike Django's
            environment["SOAK_ISOLATION"] = "repeatable read"
        if self.failpoint:
            environment["OUTBOX_FAILPOINT"], self.failpoint = self.failpoint, ""
        self.popen = processes.spawn(
            [sys.executable, *self._arguments()],
            log=self.log,
            folder=ROOT,
            environment=environment,
            user=None,
            popen=forking.Popen,
        )

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_running:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants."""
        if self.is_running:
            processes.kill_trees([self.popen.pid])

    def end(self, seconds: float = 30.0) -> int:
        """Wait for the process to end, and kill it after ``seconds``. Returns its exit code."""
        if self.popen is None:
            return 0
        try:
            self.popen.wait(seconds)
        except Exception:  # the process has not ended in time
            self.kill()
            self.popen.wait()
        processes.forget_process(self.popen.pid)
        return int(self.popen.returncode)

    def tend(self) -> None:
        """Start the process again if it has ended; continue it if it was frozen for too long."""
        if not self.is_running:
            if self.popen is not None:
                processes.forget_process(self.popen.pid)
                if self.popen.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
                    self.world.say(f"{self.name} ended with {self.popen.returncode}")
            self._frozen_since = 0.0
            self.start()
        elif not self._is_frozen():
            self._frozen_since = 0.0
        elif not self._frozen_since:
            self._frozen_since = time.monotonic()
        elif time.monotonic() - self._frozen_since > 2 * LEASE_SECONDS:
            self.signal(signal.SIGCONT)

    def _is_frozen(self) -> bool:
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def _arguments(self) -> list[str]:
        world = self.world
        if self.kind == "drainer":
            return ["manage.py", "drain_outbox"]
        if self.kind == "subscriptions":
            return ["manage.py", "run_subscriptions"]
        if self.kind == "consumer":
            return ["-m", "benchmarks.soak.consumer", str(world.arrivals)]
        if self.kind == "worker":
            return [
                *("-m", "celery", "-A", "benchmarks.soak.worker:app", "worker", "-Q", "soak-work"),
                *("-c", "1", "--without-gossip", "--without-mingle", "-l", "WARNING"),
            ]
        name = f"{self.name}-{self.starts}"
        log = world.folder / f"{self.name}.transactions"
        own = ",".join(world.writer_faults)
        arguments = [name, f"{world.seed}/{name}", str(world.rate), str(log), own]
        return ["-m", "benchmarks.soak.writer", *arguments]


class World:
    """The servers, proxies and processes; see the module.

    Args:
        database: "postgres", "mariadb" or "mysql".
        broker: "redis" or "rabbitmq".
        seed: The seed of all random choices.
        rate: Jobs that each writer stages per second.
        writer_faults: Faults that the writers inject themselves.
        counts: How many processes of each kind there are.
        outbox: Settings of the outbox.
        say: Prints a line.
    """

    def __init__(
        self,
        *,
        database: str,
        broker: str,
        seed: int,
        rate: float,
        writer_faults: Sequence[str],
        counts: dict[str, int],
        outbox: dict[str, Any],
        say: Any,
    ) -> None:
        self.seed = seed
        self.rate = rate
        self.writer_faults = writer_faults
        self.counts = counts
        self.outbox = {"LEASE_SECONDS": LEASE_SECONDS, **outbox}
        self.say = say
        self.partitions = 4
        self.database: Any = DATABASES[database]()
        self.broker: Any = BROKERS[broker]()
        self.broker_name = broker
        self.lock = threading.RLock()
        self.programs: list[Program] = []
        self._stack = ExitStack()
        self._ended = threading.Event()

    def __enter__(self) -> World:
        with ExitStack() as stack:
            stack.enter_context(self.database)
            stack.enter_context(self.broker)
            self.to_database = stack.enter_context(Proxy("127.0.0.1", self.database.port))
            self.to_broker = stack.enter_context(Proxy("127.0.0.1", self.broker.port))
            self.folder = Path(self.database.folder) / "soak"
            self.folder.mkdir()
            self.arrivals = self.folder / "arrivals.sqlite"
            with closing(connect(str(self.arrivals))) as database:
                database.executescript(TABLES)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop_tending()
        with self._stack:
            for program in self.programs:
                program.kill()

    def environment(self, *, direct: bool = True) -> dict[str, str]:
        """Return the environment of a process. It uses the proxies unless ``direct``."""
        urls = [self.database.url, self.broker.url]
        if not direct:
            for n, proxy in enumerate([self.to_database, self.to_broker]):
                urls[n] = urls[n].replace(f":{urlsplit(urls[n]).port}", f":{proxy.port}")
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.soak.project",
            "BENCHMARK_URL": urls[0],
            "SOAK_BROKER": urls[1],
            "SOAK_PARTITIONS": str(self.partitions),
            "SOAK_OUTBOX": json.dumps(self.outbox),
        }

    def start(self) -> None:
        """Start all processes, and restart them from now on."""
        for kind, count in self.counts.items():
            self.programs += [Program(kind, f"{kind}{n}", self) for n in range(count)]
        self._tender = threading.Thread(target=self._tend, daemon=True)
        self._tender.start()

    def stop_tending(self) -> None:
        """Stop restarting processes."""
        self._ended.set()
        if self.programs and self._tender.is_alive():
            self._tender.join(10)

    def some(self, kind: str, random: random.Random) -> Program:
        """Return one of the processes of a kind."""
        return random.choice([each for each in self.programs if each.kind == kind])

    def retire(self, *kinds: str) -> dict[str, int]:
        """End the processes of some kinds for good. Returns their exit codes, by name."""
        with self.lock:
            ended = [each for each in self.programs if each.kind in kinds]
            self.programs = [each for each in self.programs if each.kind not in kinds]
        for program in ended:
            program.signal(signal.SIGCONT)
            program.signal(signal.SIGTERM)
        return {program.name: program.end() for program in ended}

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command of ``manage.py``. Returns its exit code and its output."""
        import subprocess

        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def _tend(self) -> None:
        while not self._ended.wait(0.2):
            with self.lock:
                for program in self.programs:
                    program.tend()
