"""Tools of the fault tests: drainers, and books that record each job and its messages.

A ``Book`` knows every job that was staged and committed: its row's id and its shard, by task id. It
checks that the broker has each job at least once (P3), and that each extra publish belongs to an
incident that names the job's shard and id (P5).
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from outbox_app import stage_many
from outbox_app.history import Record, judge
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob
from tests import emptying, forking
from tests.conftest import VARIABLES, _missing
from tests.patience import SECONDS, eventually, patience
from tests.servers import processes
from tests.servers.mysql import MARIADB

ROOT = Path(__file__).resolve().parents[2]
#: Long leases and timeouts: even on a busy machine no publish must be in doubt.
PATIENT = {"LEASE_SECONDS": 15, "PUBLISH_TIMEOUT": 10}
#: Short leases, so that a takeover needs only seconds.
QUICK = {"LEASE_SECONDS": 2, "PUBLISH_TIMEOUT": 1, "INTERVAL": 0.1}
#: Seconds of the longest pause beside them.
BACKOFF = 0.5


def on(*aliases: str) -> pytest.MarkDecorator:
    """Run a test on these databases only."""
    names = {"default": "sqlite"}
    params = [pytest.param(alias, id=names.get(alias, alias)) for alias in aliases]
    return pytest.mark.parametrize("alias", params, indirect=True)


@contextmanager
def alias_for(url: str) -> Iterator[str]:
    """Add an alias for the time of the block, for the database of a private server at ``url``."""
    alias = f"private_{uuid4().hex[:8]}"
    parts = urlsplit(url)
    like = {"postgres": "postgres", "mysql": MARIADB}[parts.scheme]
    if like not in connections.settings:
        _missing(VARIABLES[like])
    connections.settings[alias] = {
        **deepcopy(connections.settings[like]),
        "NAME": parts.path.lstrip("/"),
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": str(parts.port),
    }
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


@contextmanager
def outbox_on(url: str, blocker: Any, settings: Any) -> Iterator[str]:
    """Yield an alias on a private server, migrated and empty, with the outbox on it."""
    with blocker.unblock(), alias_for(url) as alias:
        if StagedJob._meta.db_table not in connections[alias].introspection.table_names():
            call_command("migrate", database=alias, verbosity=0)
        emptying.empty(alias)
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
        yield alias


class Book:
    """The jobs of one test, and the messages that the broker received.

    Args:
        using: Database alias.
    """

    def __init__(self, *, using: str) -> None:
        self.using = using
        self.jobs: dict[str, tuple[int, int]] = {}
        self.sent: list[str] = []
        self.bodies: list[Any] = []

    def stage(self, app: Any, count: int, *, key: str = "", **options: Any) -> list[str]:
        """Stage jobs in one transaction and note them. Returns their task ids."""
        note = app.tasks["note"]
        ids = [str(uuid4()) for _ in range(count)]
        with transaction.atomic(using=self.using):
            stage_many(
                (note.s(key, i).set(task_id=id, **options) for i, id in enumerate(ids)),
                using=self.using,
                ordering_key=key,
            )
            self.note()  # before a running drainer can take them
        return ids

    def note(self) -> None:
        """Note the jobs that are in the table now."""
        rows = StagedJob.objects.using(self.using).values_list("task_id", "id", "shard")
        self.jobs.update({task_id: (id, shard) for task_id, id, shard in rows})

    def receive(self, app: Any, queue: str = "", url: str | None = None) -> list[str]:
        """Take the messages in the app's queue. Returns the task ids of all messages, in order."""
        queue = queue or app.conf.task_default_queue
        with app.connection_for_read(url) as connection:
            take = _take_from_redis if connection.transport.driver_type == "redis" else _take
            for headers, body in take(app.amqp.queues[queue](connection.default_channel)):
                self.sent.append(headers["id"])
                self.bodies.append(json.loads(body)[0])
        return self.sent

    @property
    def twice(self) -> dict[str, int]:
        """Jobs that were sent more than once, with the number of extra messages."""
        return {task_id: n - 1 for task_id, n in Counter(self.sent).items() if n > 1}

    def assert_complete(self, but: Iterable[str] = ()) -> None:
        """No job is lost or left, no message is unknown, and incidents explain all duplicates."""
        assert not StagedJob.objects.using(self.using).exists()
        assert set(self.jobs) - set(self.sent) == set(but)
        history = [
            Record("stage", {"job": task_id, "row": id, "shard": shard})
            for task_id, (id, shard) in self.jobs.items()
        ]
        history += [Record("publish", {"job": task_id}) for task_id in self.sent]
        history += [Record("discard", {"job": task_id}) for task_id in but]
        for each in Incident.objects.using(self.using):
            facts = {"shards": each.shards, "first": each.first_id, "last": each.last_id}
            history.append(Record("incident", {"kind": each.kind, **facts}))
        # A batch that is one pipeline may be sent again one by one.
        verdict = judge(history, promises=("P2", "P3", "P5"), sends_of_an_attempt=2)
        assert verdict.holds, verdict.findings

    def assert_exact(self, but: Iterable[str] = ()) -> None:
        """Like assert_complete; also no job was sent twice, and there are no incidents."""
        self.assert_complete(but)
        assert not self.twice
        assert not Incident.objects.using(self.using).exists()


def _take(queue: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
    for _ in range(queue.queue_declare().message_count):
        message = queue.get(no_ack=True)
        assert message is not None
        yield message.headers, message.body


def _take_from_redis(queue: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Take all messages at once: kombu takes only a thousand per second, one by one."""
    with queue.channel.client.pipeline() as pipeline:
        pipeline.lrange(queue.name, 0, -1)
        pipeline.delete(queue.name)
        texts = pipeline.execute()[0]
    for text in reversed(texts):
        message = json.loads(text)
        yield message["headers"], b64decode(message["body"])


def assert_handed_back(using: str) -> None:
    """Assert that no drainer is registered, and that no shard has an owner."""
    assert not Process.objects.using(using).exists()
    assert not Lease.objects.using(using).filter(owner__isnull=False).exists()


def listeners(using: str) -> int:
    """Return how many loops wait for a wake-up, on PostgreSQL."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND query LIKE 'LISTEN%'"
        )
        count: int = cursor.fetchone()[0]
    return count


def is_quiet(using: str) -> bool:
    """Return whether no other session has begun or ended a statement within 0.3 s (PostgreSQL)."""
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT max(state_change) < clock_timestamp() - interval '0.3 s' FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return bool(cursor.fetchone()[0])


def drain(using: str, **options: Any) -> Any:
    """Drain all jobs in this thread. Returns the DrainStats."""
    return Drain(using=using, **options).run(once=True)


class DrainThread(threading.Thread):
    """A drainer in a thread, with its own connection."""

    def __init__(self, using: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self.using = using
        self.error: BaseException | None = None
        self.drain = Drain(using=using, **options)

    def run(self) -> None:
        try:
            self.drain.run()
        except BaseException as error:
            self.error = error
        finally:
            connections[self.using].close()


@contextmanager
def draining(using: str, **options: Any) -> Iterator[Drain]:
    """Drain in a thread while the block runs. The drainer must end after stop()."""
    thread = DrainThread(using, **options)
    thread.start()
    try:
        yield thread.drain
    finally:
        thread.drain.stop()
        thread.join(patience())
    assert not thread.is_alive(), "the drainer does not stop"
    assert thread.error is None, repr(thread.error)


class Subprocess:
    """A real process of ``manage.py drain_outbox``, or of another command."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        log: Path,
        wrap: Iterable[str] = (),
        command: str = "drain_outbox",
    ) -> None:
        self.log = log
        self.popen = processes.spawn(
            [*wrap, sys.executable, "manage.py", command, *arguments],
            log=log,
            folder=ROOT,
            environment={**environment, "PYTHONWARNINGS": "default"},
            user=None,
            popen=forking.Popen,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str) -> None:
        """Wait until the process has written ``text``."""
        eventually(
            lambda: text in self.output or self.popen.poll() is not None, f"{text!r} in {self.log}"
        )
        assert text in self.output, self.output

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Wait for the process to end. Returns its exit code."""
        code = self.popen.wait(patience(seconds))
        processes.forget_process(self.pid)
        return code

    def stop(self) -> int:
        """Send SIGTERM, and wait for the end. Returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        if self.popen.poll() is None:
            processes.kill_trees([self.pid])
        self.wait()


def dead_reasons(using: str) -> dict[str, str]:
    """Return the reasons of dead jobs, by task id."""
    return dict(DeadJob.objects.using(using).values_list("task_id", "reason"))
