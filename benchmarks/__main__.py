"""The command line: starts private servers unless POSTGRES_URL and the like name some."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.servers import MariaDB, PostgreSQL, Redis
from tests.servers.base import Server

NAMES = ("admin", "drain", "entities", "log", "losses", "prepared", "spark")
#: Those that have parts, and those that run on MariaDB as well.
SCALED = ("entities", "losses", "prepared")
ELSEWHERE = ("admin", *SCALED)
#: With room for the millions of rows of ``losses``.
SERVERS: dict[str, Callable[[], Server]] = {
    "POSTGRES_URL": lambda: PostgreSQL(
        extra_arguments=["-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"]
    ),
    "MARIADB_URL": lambda: MariaDB(
        extra_arguments=["--innodb-buffer-pool-size=1G", "--innodb-log-file-size=512M"]
    ),
    "REDIS_URL": Redis,
}
#: For ``entities`` and ``prepared``: on the disk at each commit. Tests leave that out.
DURABLE = {
    "POSTGRES_URL": ("-c", "fsync=on", "-c", "full_page_writes=on"),
    "MARIADB_URL": ("--innodb-flush-log-at-trx-commit=1", "--innodb-flush-method=fsync"),
}


def main() -> None:
    """Run one benchmark, print its ratios, and write the raw rounds where asked."""
    if sys.argv[1:2] == ["soak"]:  # no benchmark: it has options and servers of its own
        from .soak.command import main as soak

        sys.exit(soak(sys.argv[2:]))
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    database = f"{options.database.upper()}_URL"
    arguments: dict[str, Any] = {"quick": options.quick}
    if options.name in SCALED:
        arguments["scale"] = options.scale
    beside = {"drain": ["REDIS_URL"], "spark": ["MARIADB_URL"]}
    with ExitStack() as stack:
        for variable in (database, *beside.get(options.name, [])):
            if variable not in os.environ:
                server = SERVERS[variable]()
                if options.name in ("entities", "prepared"):
                    server.extra_arguments += DURABLE[variable]
                os.environ[variable] = stack.enter_context(server).url
        os.environ["BENCHMARK_URL"] = os.environ[database]
        if options.name == "prepared":  # its business rows are in a database of their own
            os.environ["BENCHMARK_BILLING_URL"] = os.environ[database]
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        result = importlib.import_module(f"benchmarks.{options.name}").run(**arguments)
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios and raw rounds")
    parser.add_argument("--scale", type=float, default=1.0, help=f"{', '.join(SCALED)}: part of it")
    parser.add_argument(
        "--database",
        choices=("postgres", "mariadb"),
        default="postgres",
        help=f"{', '.join(ELSEWHERE)}: where",
    )
    options = parser.parse_args()
    if options.database != "postgres" and options.name not in ELSEWHERE:
        parser.error(f"only {', '.join(ELSEWHERE)} run on another database than PostgreSQL")
    return options


def show(result: dict[str, Any]) -> None:
    """Print each ratio beside what is asked of it."""
    for name, value in result["ratios"].items():
        print(f"{name:28} {value:10.4f}   {result['asked'].get(name, '')}")


if __name__ == "__main__":
    main()
