"""Python processes that start at once: each is forked from one that has loaded the libraries.

``forking.Popen`` and ``forking.run`` are used like those of ``subprocess``. Django, Celery and the
drivers take most of the CPU of a small process; they are loaded once for all. What is under test is
not: each process imports the package and the project, with its own environment, and sets up Django.
What is no plain command of Python, or has to be known before Python runs (``LD_PRELOAD``),
``subprocess`` starts. Where the start itself is tested, ask ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: What most processes import, and what needs no settings.
LIBRARIES = """
asyncio celery.app.amqp celery.apps.worker celery.backends.redis celery.bin.celery celery.canvas
celery.concurrency.prefork celery.concurrency.solo celery.worker.components celery.worker.consumer
celery.worker.strategy django.contrib.admin django.contrib.admin.sites django.contrib.auth.hashers
django.core.handlers.wsgi django.core.mail django.core.management.commands.check
django.db.backends.mysql.base django.db.backends.postgresql.base django.db.backends.sqlite3.base
django.db.migrations.migration django.db.models django.template.loader django.test.signals
django.urls django.views django.views.decorators.http gunicorn.app.wsgiapp
gunicorn.workers.gthread http_message_signatures kombu.transport.filesystem
kombu.transport.memory kombu.transport.pyamqp kombu.transport.redis redis
"""
#: What Python itself reads.
UNUSUAL = {"-W", "-I", "-S", "-X"}
_MOST = 200_000
_running: _Server | None = None


class Popen(subprocess.Popen[Any]):
    """A process that ``_Server`` forks; what it is told and how it ends are as ever.

    It replaces the three methods of its base that fork and wait: Python has no public ones.
    """

    _answers: socket.socket | None = None
    _status: int | None = None

    def _execute_child(self, args: Any, *options: Any) -> None:
        cwd, env = options[4:6]
        ends, new_session = options[9:15], options[20]
        if args[0] != sys.executable or args[1] in UNUSUAL or "LD_PRELOAD" in (env or os.environ):
            super()._execute_child(args, *options)
            return
        told = {
            "arguments": [str(each) for each in args[1:]],
            "folder": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "new_session": new_session,
        }
        theirs = [end if end != -1 else fd for fd, end in enumerate((ends[0], ends[3], ends[5]))]
        self._answers, answers = socket.socketpair()
        with answers:
            _server().ask(told, [*theirs, answers.fileno()])
        self.pid = int.from_bytes(self._answers.recv(4))
        if not self.pid:
            raise ChildProcessError("the process that forks has ended")
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._answers is None:
            return super()._try_wait(wait_flags)
        if self._status is None:
            self._answers.setblocking(not wait_flags & os.WNOHANG)
            try:
                answer = self._answers.recv(4)
            except BlockingIOError:
                return 0, 0
            self._status = int.from_bytes(answer) if answer else signal.SIGKILL
            self._answers.close()
        return self.pid, self._status

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: list[str],
    *,
    check: bool = False,
    capture_output: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


class _Server:
    """The process that forks, as its owner sees it. It ends when its owner does."""

    def __init__(self) -> None:
        from tests.servers import processes  # not for those who are forked

        self.socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        environment = {**os.environ}
        environment.pop("DJANGO_SETTINGS_MODULE", None)  # a library that asks for settings fails
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking"],
                cwd=ROOT,
                env=environment,
                stdin=theirs,
                start_new_session=True,
            )
        processes.guard_process(self.process.pid)

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # whoever was forked from here has it, too
        self.socket.close()
        self.process.wait()

    def ask(self, told: dict[str, Any], files: list[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(told).encode()], files)


def _server() -> _Server:
    global _running
    if _running is None or _running.process.poll() is not None:
        _running = _Server()
        atexit.register(_running.end)
    return _running


def _serve() -> dict[str, Any]:
    """Fork for each who asks. Returns in the children, what each was told."""
    asked = socket.socket(fileno=os.dup(0))
    selector = selectors.DefaultSelector()
    selector.register(asked, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data:
                _has_ended(selector, key)
                continue
            message, files, *_ = socket.recv_fds(asked, _MOST, 4)
            if not message:
                os._exit(0)
            if not (child := os.fork()):
                for each in selector.get_map().values():
                    os.close(each.fd)
                asked.detach()
                selector.close()
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                for file in files:
                    os.close(file)
                told: dict[str, Any] = json.loads(message)
                return told
            for file in files[:3]:
                os.close(file)
            answers = socket.socket(fileno=files[3])
            answers.sendall(child.to_bytes(4))
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, answers))


def _has_ended(selector: Any, key: Any) -> None:
    child, answers = key.data
    _, status = os.waitpid(child, 0)
    selector.unregister(key.fd)
    os.close(key.fd)
    with answers, contextlib.suppress(BrokenPipeError):  # nobody waits for it
        answers.sendall(status.to_bytes(4))


def _end(code: int) -> None:
    """Do what Python does at its end, but for taking apart a thousand modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(told: dict[str, Any]) -> int:
    """Run the command. Returns its exit code; what it raises ends Python as ever."""
    if told["new_session"]:
        os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    if action := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(action)
    sys.path[0:1] = [
        told["folder"],
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    kind, *arguments = told["arguments"]
    try:
        if kind == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(arguments[0], {"__name__": "__main__"})
        else:
            sys.argv = [kind, *arguments]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        return error.code or 0
    return 0


if __name__ == "__main__":
    for library in LIBRARIES.split():
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    _end(_become(_serve()))
