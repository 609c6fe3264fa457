"""Child processes of ``demo`` and ``up``: started, watched, and stopped by their process id.

Each child gets a session of its own, so a Ctrl-C in the terminal reaches only the parent, and the
parent decides. The parent stops a child with SIGTERM, which every child takes as "finish what you
are doing". A child that does not end within the grace time is killed; its exit code shows it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

from django.conf import settings

#: Seconds between SIGTERM and SIGKILL.
GRACE = 20.0
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PYTHON = [sys.executable, "-u"]
MANAGE = [*PYTHON, str(settings.BASE_DIR / "manage.py")]
DRAINER = [*MANAGE, "drain_outbox"]
WORKER = [*PYTHON, "-m", "celery", "-A", "example_project", "worker", "--concurrency", "2"]
SUBSCRIPTIONS = [*MANAGE, "run_subscriptions"]
WEB = [*MANAGE, "runserver", "--noreload"]


class Child:
    """A process that writes to a log file, or to the terminal with its name before each line."""

    def __init__(self, name, command, log=None, environment=None):
        self.name = name
        self.log = log
        with contextlib.ExitStack() as files:
            output = files.enter_context(log.open("wb")) if log else subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                cwd=settings.BASE_DIR,
                env={**os.environ, "PYTHONIOENCODING": "utf-8", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if not log:
            threading.Thread(target=self._prefix_output, daemon=True).start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def exit_code(self):
        """The exit code, or None while the process runs."""
        return self._process.poll()

    def is_frozen(self):
        """Return whether SIGSTOP has stopped the process since the last call."""
        if self.exit_code is not None:
            return False
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        return pid != 0 and os.WIFSTOPPED(status)

    def wait(self, timeout=None):
        """Wait for the end of the process; return its exit code."""
        return self._process.wait(timeout)

    def ask_to_stop(self):
        """Send SIGTERM."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self):
        """Send SIGKILL, and wait for the end of the process."""
        self._process.kill()
        self._process.wait()

    def _prefix_output(self):
        for line in self._process.stdout:
            text = line.decode(errors="replace")
            sys.stdout.write(f"{self.name:>8} | {text}")
            sys.stdout.flush()


def stop(children):
    """Send SIGTERM to all children; kill those that still run after the grace time."""
    with uninterrupted():
        for child in children:
            child.ask_to_stop()
        deadline = time.monotonic() + GRACE
        for child in children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()


@contextlib.contextmanager
def uninterrupted():
    """Ignore Ctrl-C inside the block: a second, impatient one would leave children behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_on_termination():
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt in this program, as Ctrl-C does."""
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
