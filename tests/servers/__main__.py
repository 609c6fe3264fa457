"""Command line of the test servers.

``run [--only postgres,redis] -- COMMAND`` starts the servers in parallel, passes their addresses to
COMMAND in POSTGRES_URL, MARIADB_URL, REDIS_URL and RABBITMQ_URL, and exits with COMMAND's exit
code. A server whose variable is already set is not started. SIGINT and SIGTERM are forwarded to
COMMAND. The servers always end with the run. MySQL, in MYSQL_URL, starts if ``--only`` names it.
``--needed`` starts only the servers that the tests of COMMAND need, if it names files or folders of
tests (see ``needed``).
``--workers N`` starts N sets of servers, one for each worker of ``pytest -n auto`` (see ``sets``),
with one RabbitMQ for all. The servers live in memory if there is enough (see ``ports``). Python may
write .pyc files: else each worker would compile every test, and each process of a test would
compile all of outbox_app.
If a variable names a server of yours, there is one set, and pytest runs without workers.
``install`` installs the missing packages, or lists them and exits with code 2. ``unpack`` downloads
MySQL (see ``unpacked``), or says why it is not to be had, and exits with code 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from . import (
    MariaDB,
    MissingPackages,
    MySQL,
    PostgreSQL,
    RabbitMQ,
    Redis,
    Server,
    ServerFailed,
    ports,
    processes,
    sets,
)
from .install import install
from .mysql import PACKAGES
from .needed import CHOSEN, needed
from .unpacked import unpacked

SERVERS: dict[str, type[Server]] = {
    "postgres": PostgreSQL,
    "mariadb": MariaDB,
    "redis": Redis,
    "rabbitmq": RabbitMQ,
    "mysql": MySQL,
}
#: What starts unless ``--only`` says other.
USUAL = [name for name in SERVERS if name != "mysql"]
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_TO_END = 20


class Interrupted(BaseException):
    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        if options.action == "install":
            print("installed:", " ".join(install()) or "nothing, all is there")
            return 0
        if options.action == "unpack":
            print(unpacked(*PACKAGES))
            return 0
        names = options.only
        if options.needed and (found := needed(options.command, names)) is not None:
            names = [name for name in names if name in found]
            os.environ[CHOSEN] = ", ".join(names) or "no server"
            print(f"the tests need {os.environ[CHOSEN]}", file=sys.stderr)
        return run(options.command, names, workers=options.workers)
    except MissingPackages as error:
        print(error, file=sys.stderr)
        return 2
    except (ServerFailed, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    except Interrupted as interrupt:
        return 128 + interrupt.signal_number


def run(command: Sequence[str], names: Sequence[str], *, workers: int = 1) -> int:
    """Run the command with the servers. Returns its exit code."""
    for signal_number in SIGNALS:
        signal.signal(signal_number, _interrupt)
    missing = [name for name in names if not os.environ.get(_variable(name))]
    if missing != list(names):
        workers = 1
    if workers > 1:
        os.environ |= ports.in_memory()
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    servers = {name: _servers(SERVERS[name], workers) for name in missing}
    every = [server for each in servers.values() for server in each]
    try:
        _start_all(every)
        urls: list[dict[str, str]] = [{} for _ in range(workers)]
        for name, each in servers.items():
            addresses = [url for server in each for url in server.urls]
            for own, address in zip(urls, addresses, strict=True):
                own[_variable(name)] = address
        with sets.offered(urls) as variables:
            return _run_command(command, {**os.environ, **variables})
    finally:
        _ignore_signals()
        for server in every:
            server.close()


def _servers(kind: type[Server], workers: int) -> list[Server]:
    """Return a server for each worker, or one RabbitMQ with a virtual host for each."""
    if issubclass(kind, RabbitMQ) and workers > 1:
        return [RabbitMQ(virtual_hosts=[f"worker-{number}" for number in range(workers)])]
    return [kind() for _ in range(workers)]


def _variable(name: str) -> str:
    return f"{name.upper()}_URL"


def _start_all(servers: Sequence[Server]) -> None:
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        starts = [pool.submit(_start, server) for server in servers]
        try:
            for start in concurrent.futures.as_completed(starts):
                start.result()
        except BaseException:
            for server in servers:  # Otherwise the pool would wait for the slowest server.
                server.close()
            raise


def _start(server: Server) -> None:
    begin = time.monotonic()
    server.start()
    seconds = time.monotonic() - begin
    print(f"{server.name} ready after {seconds:.1f} s: {server.url}", file=sys.stderr)


def _run_command(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        print(f"cannot run {command[0]}: {error}", file=sys.stderr)
        return 127
    processes.guard_process(process.pid, gently=True)
    try:
        return _exit_code(process.wait())
    except Interrupted as interrupt:
        # The terminal has sent Ctrl-C to the command, too. A second one would abort pytest.
        if not (interrupt.signal_number == signal.SIGINT and _is_in_foreground()):
            process.send_signal(interrupt.signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        raise
    finally:
        if process.poll() is None:
            processes.kill_trees([process.pid])
            process.wait()
        processes.forget_process(process.pid)


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _is_in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    _ignore_signals()  # A second signal must not interrupt the clean-up.
    raise Interrupted(signal_number)


def _ignore_signals() -> None:
    for signal_number in SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers",
        usage="%(prog)s [--only NAMES] [--needed] [--workers N] {install,unpack,run -- COMMAND}",
    )
    parser.add_argument("--only", type=_names, default=USUAL, metavar="NAME,NAME")
    parser.add_argument("--needed", action="store_true")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("action", choices=("install", "unpack", "run"))
    options = parser.parse_args(given[:end])
    options.command = given[end + 1 :]
    if (options.action == "run") != bool(options.command):
        parser.error("run needs a command after --, and the others take none")
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    return options


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(SERVERS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
