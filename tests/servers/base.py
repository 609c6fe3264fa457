"""The base class of all private test servers.

A server has its own temporary folder and ports, so that any number of instances can run at once.
``start`` returns when the server accepts connections. ``stop`` (graceful) and ``kill`` (SIGKILL)
keep port and data: a later ``start`` continues with them. ``close`` ends the server for good and
removes the folder; leaving a ``with`` block closes the server. A server that is not closed ends
with the process that started it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from tests.patience import patience

from . import processes
from .ports import free_port, make_folder

_FOREIGN_SETTINGS = re.compile(r"(PG|MYSQL|MARIADB|RABBITMQ|ERL_|REDIS)|NOTIFY_SOCKET$")
_PORT_TAKEN = re.compile(r"already in use|eaddrinuse|port_already_used", re.IGNORECASE)
_Self = TypeVar("_Self", bound="Server")


class ServerFailed(RuntimeError):
    """The server did not start; the message ends with the tail of its log."""


class PortTaken(ServerFailed):
    """Another process took the port between our choice and the start of the server."""


class Server:
    name: ClassVar[str]
    ready_text: ClassVar[str]
    stop_signal: ClassVar[int] = signal.SIGTERM
    start_timeout: ClassVar[float] = 60.0
    stop_timeout: ClassVar[float] = 30.0

    def __init__(self, *, extra_arguments: Sequence[str] = ()) -> None:
        self.extra_arguments = tuple(extra_arguments)
        self.port = 0
        self.user: str | None = None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def urls(self) -> list[str]:
        """The addresses for the workers of pytest, one for each."""
        return [self.url]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._folder

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> None:
        with self._lock:
            if self.is_running:
                raise RuntimeError(f"{self.name} is running already")
            if self._closing.is_set():
                raise RuntimeError(f"{self.name} has been closed")
            self._forget_process()
            if self._folder is None:
                self._retry_when_port_taken(self._first_start, attempts=5)
            else:
                self._retry_when_port_taken(self._launch, attempts=20)

    def stop(self) -> None:
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                tree = processes.process_tree(process.pid)
                processes.continue_tree(process.pid)
                process.send_signal(self.stop_signal)
                if not processes.wait_for_end(tree, self.stop_timeout):
                    self.kill()
                    raise ServerFailed(f"{self.name} did not stop in time, it has been killed")
            self._forget_process()

    def kill(self) -> None:
        with self._lock:
            process = self._process
            if process is not None and process.poll() is None:
                processes.kill_trees([process.pid])
            self._forget_process()

    def pause(self) -> None:
        processes.stop_tree(self.pid)

    def resume(self) -> None:
        processes.continue_tree(self.pid)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self._closing.set()  # A start in progress in another thread gives up.
        with self._lock:
            self._discard()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Each kind of server defines these methods.

    def _create_data(self) -> None:
        """Called once, before the first launch."""

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _prepare(self) -> None:
        """Called once, after the first launch."""

    # The steps of a start.

    def _retry_when_port_taken(self, step: Callable[[], None], attempts: int) -> None:
        for attempt in range(1, attempts + 1):
            try:
                step()
                return
            except PortTaken:
                if attempt == attempts:
                    raise
                time.sleep(0.25)

    def _first_start(self) -> None:
        self._folder = make_folder(self.name, self.user)
        processes.guard_folder(self._folder)
        try:
            self._choose_ports()
            self._create_data()
            self._launch()
            self._prepare()
        except BaseException:
            self._discard()
            raise

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _launch(self) -> None:
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0
        self._process = self._spawn(self._command())
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        # Only the log of our own process proves that our server listens: if another process has
        # taken the port in the meantime, its server would answer connections, too.
        assert self._process is not None
        begin = time.monotonic()
        while self.ready_text not in self._new_log():
            if self._process.poll() is not None:
                raise self._failure(f"ended with exit code {self._process.returncode}")
            if (waited := time.monotonic() - begin) > patience(self.start_timeout):
                raise self._failure(f"was not ready after {waited:.0f} s")
            self._pause_between_looks()

    def _run(self, *command: str) -> None:
        """Run a helper program to its end. Its output goes to the log."""
        process = self._spawn(command)
        try:
            while process.poll() is None:
                self._pause_between_looks()
        finally:
            if process.poll() is None:
                processes.kill_trees([process.pid])
                process.wait()
            processes.forget_process(process.pid)
        if process.returncode != 0:
            raise self._failure(f"could not run {command[0]}")

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return processes.spawn(
            command,
            log=self.log,
            folder=self.folder,
            environment=self._environment(),
            user=self.user,
        )

    def _environment(self) -> dict[str, str]:
        own = {"HOME": str(self.folder), "LC_ALL": "C.UTF-8", "TMPDIR": str(self.folder)}
        kept = {k: v for k, v in os.environ.items() if not _FOREIGN_SETTINGS.match(k)}
        return kept | own

    def _pause_between_looks(self) -> None:
        if self._closing.wait(0.02):
            raise ServerFailed(f"{self.name} was closed while it was starting")

    def _failure(self, what: str) -> ServerFailed:
        new_log = self._new_log()
        tail = "\n".join(new_log.splitlines()[-30:])
        kind = PortTaken if _PORT_TAKEN.search(new_log) else ServerFailed
        return kind(f"{self.name} {what}. The end of its log:\n{tail}")

    def _new_log(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def _forget_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.wait()
            processes.forget_process(process.pid)

    def _discard(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
