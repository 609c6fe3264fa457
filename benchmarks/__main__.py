"""The command line: starts private servers, unless POSTGRES_URL and the like name running ones.

Each server writes to disk at each commit, as a server with default settings does. ``all`` runs the
benchmarks of ``docs/explanation/performance.md`` one after another, each on fresh servers.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.servers import MariaDB, MySQL, PostgreSQL, RabbitMQ, Redis

from . import report

POSTGRES, MARIADB, MYSQL, SQLITE = "postgres", "mariadb", "mysql", "sqlite"


class Needs(NamedTuple):
    """The servers of a benchmark: one of ``databases`` (default: the first), and all ``beside``."""

    beside: tuple[str, ...] = ()
    databases: tuple[str, ...] = (POSTGRES,)
    of_all: bool = True


EVERY = (POSTGRES, MARIADB, SQLITE)
BENCHMARKS = {
    "drain": Needs(("redis", MARIADB, SQLITE)),
    "rabbitmq": Needs(("rabbitmq",)),
    "stage": Needs(("redis",)),
    "latency": Needs(("redis",), EVERY),
    "growth": Needs(("redis",)),
    "log": Needs(),
    "peers": Needs(("redis",)),
    "cost": Needs(("redis",)),
    "admin": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "archive": Needs((MARIADB,), of_all=False),
    "door": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "entities": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "fleet": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "follow": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "keepup": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "losses": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "prepared": Needs((), (POSTGRES, MARIADB, MYSQL), of_all=False),
    "spark": Needs((POSTGRES, MARIADB), of_all=False),
}


@contextmanager
def file_of_sqlite() -> Iterator[SimpleNamespace]:
    """Yield a database file in a temporary folder, in place of a server."""
    with tempfile.TemporaryDirectory(prefix="outbox-benchmark-") as folder:
        yield SimpleNamespace(url=f"sqlite://{folder}/outbox.sqlite3")


#: Servers with memory for the millions of rows of ``losses``, which write to disk at each commit.
SERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    POSTGRES: lambda: PostgreSQL(
        extra_arguments=[
            *("-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"),
            *("-c", "fsync=on", "-c", "full_page_writes=on"),
        ]
    ),
    MARIADB: lambda: MariaDB(
        extra_arguments=[
            *("--innodb-buffer-pool-size=1G", "--innodb-log-file-size=512M"),
            *("--innodb-flush-log-at-trx-commit=1", "--innodb-flush-method=fsync"),
        ]
    ),
    MYSQL: lambda: MySQL(
        extra_arguments=[
            *("--innodb-buffer-pool-size=1G", "--innodb-redo-log-capacity=1G"),
            *("--innodb-flush-log-at-trx-commit=1", "--innodb-flush-method=fsync"),
            "--sync-binlog=1",
        ]
    ),
    SQLITE: file_of_sqlite,
    "redis": Redis,
    "rabbitmq": RabbitMQ,
}


def main() -> None:
    """Run one benchmark, print its ratios, and write the raw rounds to a file if asked to."""
    with suppress(OSError):  # Python sets it, and then asks for the place in the file
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    if sys.argv[1:2] == ["soak"]:  # not a benchmark: it has its own options and servers
        from .soak.command import main as soak

        sys.exit(soak(sys.argv[2:]))
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped, too
    if options.name == "all":
        sys.exit(run_all(options.json or report.RESULTS, quick=options.quick))
    result = run(options)
    for name, value, asked, mark in report.rows(result):
        print(f"{name:32} {value:>10}   {asked:20} {mark}")
    for title, (heads, lines) in result.get("tables", {}).items():
        print("", title, *report.table(heads, lines), sep="\n")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run a benchmark on its servers; add the machine and the versions to its result."""
    needs = BENCHMARKS[options.name]
    machine, began = report.machine(), time.time()
    with ExitStack() as stack:
        for name in {options.database: None, **dict.fromkeys(needs.beside)}:
            if f"{name.upper()}_URL" not in os.environ:
                url = stack.enter_context(SERVERS[name]()).url
                os.environ[f"{name.upper()}_URL"] = url
        os.environ["BENCHMARK_URL"] = os.environ[f"{options.database.upper()}_URL"]
        if options.name == "prepared":  # its business rows are in a second database
            os.environ["BENCHMARK_BILLING_URL"] = os.environ["BENCHMARK_URL"]
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        if needs.of_all:
            isolate(stack, "default", *(name for name in needs.beside if name in EVERY))
        measure = importlib.import_module(f"benchmarks.{options.name}").run
        arguments: dict[str, Any] = {"quick": options.quick}
        if "scale" in inspect.signature(measure).parameters:
            arguments["scale"] = options.scale
        elif options.scale != 1:
            sys.exit(f"{options.name} has no parts: leave out --scale")
        result: dict[str, Any] = measure(**arguments)
        machine["load"] += report.machine()["load"]
        return {
            **{key: result.pop(key) for key in ("ratios", "asked", "tables") if key in result},
            **{"quick": options.quick, "scale": options.scale},
            "seconds": round(time.time() - began),
            **{"machine": machine, "versions": report.versions()},
            "durability": report.durability(),
            **result,
        }


def isolate(stack: ExitStack, *aliases: str) -> None:
    """Run the rest in scratch databases, so that other databases of the servers do not matter."""
    import django

    django.setup()
    from .losses import scratch_database

    for alias in aliases:
        stack.enter_context(scratch_database(alias))


def run_all(folder: Path, *, quick: bool) -> int:
    """Run the benchmarks of ``all``, each in its own process. Returns how many failed."""
    files, failed = [], 0
    for name, needs in BENCHMARKS.items():
        for database in needs.databases if needs.of_all else ():
            file = name if database == needs.databases[0] else f"{name}-{database}"
            print(f"\n{file}", flush=True)
            command = [sys.executable, "-m", "benchmarks", name, "--database", database]
            command += ["--json", str(folder / f"{file}.json"), *(["--quick"] if quick else [])]
            failed += subprocess.run(command).returncode != 0
            files.append(file)
    report.write(folder, files)
    print("\n" + (folder / report.TABLE).read_text())
    return failed


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=(*BENCHMARKS, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write ratios and raw rounds; for all, a folder instead of benchmarks/results",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="part of it, where it has parts")
    parser.add_argument("--database", choices=(*EVERY, MYSQL), default=POSTGRES, help="where")
    options = parser.parse_args()
    if options.database not in BENCHMARKS.get(options.name, Needs()).databases:
        parser.error(f"{options.name} does not run on {options.database}")
    return options


if __name__ == "__main__":
    main()
