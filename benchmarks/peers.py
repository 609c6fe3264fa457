"""outbox_app beside other packages that take jobs from a transaction to the worker, in turns.

- ``stage_1``, ``stage_100``: rows per second, one and a hundred in each transaction, call by call
- ``stage_many``: a hundred in each transaction, by the package's call for many, if it has one
- ``move``: jobs per second from the table to the broker; if the database is the queue, jobs run
- ``p50``, ``p99``: milliseconds from the commit to the broker, or to the start of the job

The contenders are in ``contenders``; ``make bench`` installs them in a separate environment.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import site
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .contenders import ARRIVED, CONTENDERS, Contender, broker

ASKED: dict[str, str] = {}
#: Jobs per second in the measurement of latency, and the number of the first warm-up job.
RATE, WARM = 50, 1_000_000
HERE = Path(__file__).parent
FOLDER = HERE / f".venv-peers-{sysconfig.get_python_version()}"
PACKAGES = FOLDER / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
_ARRIVALS = (
    re.compile(rb'^\+?([\d.]+) .*"LPUSH" .*argsrepr[^([]*[([](-?\d+)'),
    re.compile(rb'^\+?([\d.]+) .*"RPUSH" "' + ARRIVED.encode() + rb'" "(-?\d+)"'),
)

Round = dict[str, dict[str, float]]


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (none are asked), ``tables`` (medians), and ``rounds``.
    """
    jobs, timed, rounds = (1_000, 20, 5) if quick else (5_000, 100, 9)
    if scale == 1:
        install()
    jobs, timed = max(10, int(jobs * scale)), max(3, int(timed * scale))
    measured: list[Round] = []
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(name)) for name in CONTENDERS if is_installed(name)]
        for number in range(rounds if scale == 1 else 1):
            order = peers[:: -1 if number % 2 else 1]
            measured.append({peer.name: peer.measure(jobs, timed) for peer in order})
            print(f"round {number + 1}/{rounds}: {_line(measured[-1])}", flush=True)
    return {"ratios": _ratios(measured), "asked": ASKED, "tables": _tables(measured)} | {
        "rounds": measured
    }


def install() -> None:
    """Create the peers' environment: outbox_app's packages, and those that only peers need."""
    done = FOLDER / "installed"
    wanted = (HERE / "peers.txt").read_text()
    if done.exists() and done.read_text() == wanted:
        return
    venv.create(FOLDER, clear=True, with_pip=False)
    ours = sysconfig.get_path("purelib")
    (PACKAGES / "outbox_app.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(FOLDER / "bin" / "python")]
    options = ["-qq", "--disable-pip-version-check", "--requirement", str(HERE / "peers.txt")]
    subprocess.run([*pip, "install", *options], check=True)
    done.write_text(wanted)


def is_installed(name: str) -> bool:
    """Return whether the package of a contender is installed."""
    module = CONTENDERS[name].apps[-1].split(".")[0]
    return importlib.util.find_spec(module) is not None or (PACKAGES / module).exists()


class Peer:
    """A contender in its own process, with its tables in its own database."""

    def __init__(self, name: str) -> None:
        self.name, self.kind = name, CONTENDERS[name]
        self.context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(1, self.context, _begin, (name,))

    def __enter__(self) -> Peer:
        self.pool.submit(_create_tables).result()
        if self.kind.moves:
            self.move(10)  # warm
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.submit(_drop_tables).result()
        self.pool.shutdown()

    def measure(self, jobs: int, timed: int) -> dict[str, float]:
        """Measure everything that the contender can do."""
        few = max(5, int(jobs * self.kind.share))
        found = {"stage_1": self.stage(few, 1), "stage_100": self.stage(few, 100)}
        if self.kind.stages_many:
            found["stage_many"] = self.stage(few, 100, many=True)
        if self.kind.moves:
            found["move"] = self.move(few)
        return found | self.latency(timed)

    def stage(self, jobs: int, size: int, *, many: bool = False) -> float:
        """Return rows per second, with ``size`` rows in each transaction. Deletes the rows."""
        return self.pool.submit(_stage, jobs, size, many=many, keep=False).result()

    def move(self, jobs: int) -> float:
        """Return jobs per second, from the table to the broker or to the end of the job."""
        return self.pool.submit(_move, jobs).result()

    def latency(self, jobs: int) -> dict[str, float]:
        """Return p50 and p99 from the commit to the broker, or to the job, in milliseconds."""
        server = None
        if self.kind.serve is not None:
            server = self.context.Process(target=_serve, args=(self.name,), daemon=True)
            server.start()
        try:
            with arrivals() as arrived:
                _wait_for(arrived, self.pool.submit(_commit, range(WARM, WARM + 5)).result())
                committed = self.pool.submit(_commit, range(jobs)).result()
                _wait_for(arrived, committed)
        finally:
            if server is not None:
                server.kill()
                server.join()
            self.pool.submit(_empty).result()
        found = sorted(1000 * (arrived[number] - at) for number, at in committed.items())
        return {"p50": statistics.median(found), "p99": found[int(0.99 * len(found))]}


@contextmanager
def arrivals() -> Iterator[dict[int, float]]:
    """Yield a dictionary that fills with the time at which Redis received each job, by number."""
    import redis

    found: dict[int, float] = {}
    client = redis.Redis.from_url(broker(), socket_timeout=None)

    def listen(connection: Any) -> None:
        connection.send_command("MONITOR")
        while True:
            try:
                line = connection.read_response(disconnect_on_error=False)
            except (OSError, ValueError, AttributeError, redis.ConnectionError):
                return
            for each in _ARRIVALS:
                if match := each.match(line):
                    found.setdefault(int(match[2]), float(match[1]))

    connection = client.connection_pool.get_connection()
    thread = threading.Thread(target=listen, args=(connection,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        connection.disconnect()
        client.close()


def _wait_for(arrived: dict[int, float], committed: dict[int, float]) -> None:
    deadline = time.monotonic() + 60
    while not committed.keys() <= arrived.keys():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(committed.keys() - arrived.keys())} jobs have not arrived")
        time.sleep(0.01)


# These functions run in the process of the contender.

_of_process: dict[str, Any] = {}


def _begin(name: str) -> None:
    kind = CONTENDERS[name]
    site.addsitedir(str(PACKAGES))
    os.environ["BENCHMARK_APPS"] = ",".join(kind.apps)
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.peer_settings"
    import django

    django.setup()
    contender = _of_process["contender"] = kind()
    contender.begin()


def _contender() -> Contender:
    found: Contender = _of_process["contender"]
    return found


def _create_tables() -> None:
    from django.core.management import call_command

    _drop_tables(create=True)
    call_command("migrate", verbosity=0)


def _drop_tables(*, create: bool = False) -> None:
    from django.db import connection

    name = connection.settings_dict["NAME"]
    connection.close()
    with connection._nodb_cursor() as cursor:
        cursor.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        if create:
            cursor.execute(f'CREATE DATABASE "{name}"')


def _stage(jobs: int, size: int, *, many: bool, keep: bool) -> float:
    from django.db import transaction

    contender = _contender()
    started = time.perf_counter()
    for start in range(0, jobs, size):
        numbers = range(-1 - start, -1 - min(start + size, jobs), -1)
        with transaction.atomic():
            if many:
                contender.stage_many(numbers)
            else:
                for number in numbers:
                    contender.stage(number)
    seconds = time.perf_counter() - started
    if not keep:
        _empty()
    return jobs / seconds


def _move(jobs: int) -> float:
    import redis

    contender = _contender()
    _stage(jobs, jobs, many=True, keep=True)
    with redis.Redis.from_url(broker()) as client:
        client.flushdb()
        started = time.perf_counter()
        contender.move()
        seconds = time.perf_counter() - started
        if not contender.done and (arrived := client.llen("celery")) != jobs:
            raise RuntimeError(f"{jobs} jobs were staged, {arrived} arrived")
        client.flushdb()
    return jobs / seconds


def _commit(numbers: range) -> dict[int, float]:
    """Commit ``RATE`` jobs per second. Returns the time of each commit, by the job's number."""
    from django.db import transaction

    contender, committed = _contender(), {}
    contender.at_once(True)
    for number in numbers:
        time.sleep(1 / RATE)
        with transaction.atomic():
            # Registered first, so that it is called before the contender sends after the commit.
            transaction.on_commit(lambda number=number: committed.update({number: time.time()}))
            contender.stage(number)
    contender.at_once(False)
    return committed


def _serve(name: str) -> None:
    _begin(name)
    _contender().serve()


def _empty() -> None:
    """Empty every table of the contender, and the broker."""
    import redis
    from django.apps import apps
    from django.db import connection

    tables = [f'"{model._meta.db_table}"' for model in apps.get_models()]
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {', '.join(tables)} CASCADE")
    with redis.Redis.from_url(broker()) as client:
        client.flushdb()


# The results.


def _median(rounds: list[Round], name: str, what: str) -> float | None:
    found = [turn[name][what] for turn in rounds if what in turn.get(name, {})]
    return statistics.median(found) if found else None


def _ratios(rounds: list[Round]) -> dict[str, float]:
    """Return outbox_app's rates divided by those of each peer, for what the peer can do."""
    found = {}
    for name in rounds[0]:
        for what in ("stage_100", "move") if name != "outbox_app" else ():
            if what in rounds[0][name]:
                each = [turn["outbox_app"][what] / turn[name][what] for turn in rounds]
                found[f"{what}_vs_{name}"] = round(statistics.median(each), 4)
    return found


def _tables(rounds: list[Round]) -> dict[str, Any]:
    columns = ["stage_1", "stage_100", "stage_many", "move", "p50", "p99"]
    heads = ["", "stage 1", "stage 100", "stage many", "move", "to", "p50 ms", "p99 ms"]
    lines = []
    for name in CONTENDERS:
        if name in rounds[0]:
            cells = [_cell(_median(rounds, name, what)) for what in columns]
            cells.insert(4, "job done" if CONTENDERS[name].done else "broker")
            lines.append([name, *cells])
    return {"Jobs a second, and time from the commit to the broker or the job": [heads, lines]}


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _line(turn: Round) -> str:
    return json.dumps({name: round(each.get("move", 0)) for name, each in turn.items()})
