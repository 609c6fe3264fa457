"""A Celery worker in a process of its own, and the messages that it would get."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery

from tests import forking
from tests.servers.processes import forget_process, kill_trees, spawn

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Worker:
    """A worker process with its pool."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls,
        app: str,
        options: str,
        *,
        log: Path,
        environment: dict[str, str],
        popen: Callable[..., Any] = forking.Popen,
    ) -> Worker:
        """Start a worker for the Celery app of a module, which talks to no other worker."""
        command = f"-m celery -A {app} worker -l INFO --without-gossip --without-mingle {options}"
        process = spawn(
            [sys.executable, *command.split()],
            log=log,
            folder=ROOT,
            environment=environment,
            user=None,
            popen=popen,
        )
        return cls(process, log)

    def kill(self) -> None:
        """SIGKILL for all of its processes."""
        kill_trees([self.process.pid])
        self.process.wait()

    def end(self) -> None:
        """Kill it at the end of a test."""
        self.kill()
        forget_process(self.process.pid)


def received(app: Celery) -> list[Any]:
    """Take the messages out of the app's queue."""
    messages = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue](connection.default_channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            messages.append(message)
    return messages
