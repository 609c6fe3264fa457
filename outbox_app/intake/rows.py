"""Rows on their way into the caller's transaction.

Rows of one call (a group, ``stage_many``) are collected and written by one INSERT a chunk, at the
end of the
outermost block: if anything of the call is refused, nothing of it is written. A row is written
    inside the transaction that is open on its alias; where the INSERT fails (a lock timeout, say)
    Django marks that transaction for rollback, so the business row cannot be committed without the
    job.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from zlib import crc32

from django.db import connections, router, transaction

from ..conf import SHARDS, settings
from ..exceptions import InvalidJob
from ..signals import jobs_staged
from .wake import wake_after_commit

if TYPE_CHECKING:  # a project's celery.py is imported before Django's models may be
    from ..models import StagedJob

#: A multi-row INSERT ends at this many rows or bytes, whichever comes first.
CHUNK_ROWS = 1000
CHUNK_BYTES = 1024 * 1024


class Rows:
    """Rows that one call stages, not written yet.

    Args:
        streaming: Write as soon as a chunk is full. The caller then holds a savepoint, so that all
            of it can still be undone.
    """

    def __init__(self, *, streaming: bool = False) -> None:
        self.streaming = streaming
        self.waiting: dict[str, list[StagedJob]] = {}
        self.bytes = 0

    def add(self, job: StagedJob, *, using: str) -> None:
        """Take one row for the alias ``using``."""
        waiting = self.waiting.setdefault(using, [])
        waiting.append(job)
        self.bytes += job.size
        if self.streaming and (len(waiting) >= CHUNK_ROWS or self.bytes >= CHUNK_BYTES):
            self.write()

    def write(self) -> None:
        """Write what was taken, all of it or none."""
        waiting, self.waiting, self.bytes = self.waiting, {}, 0
        for using, jobs in waiting.items():
            with transaction.atomic(using=using, savepoint=False):
                for chunk in _chunks(jobs):
                    write(chunk, using=using)


_collecting: ContextVar[Rows | None] = ContextVar("outbox_app_rows", default=None)


@contextmanager
def collecting(*, streaming: bool = False) -> Iterator[Rows]:
    """Collect the rows staged inside; write them when the outermost block ends without an error."""
    outer = _collecting.get()
    if outer is not None:
        yield outer
        return
    rows = Rows(streaming=streaming)
    _collecting.set(rows)
    try:
        yield rows
    finally:
        _collecting.set(None)
    rows.write()


def add(job: StagedJob, *, using: str) -> None:
    """Write a row now, or with the others of the call in progress."""
    rows = _collecting.get()
    if rows is None:
        write([job], using=using)
    else:
        rows.add(job, using=using)


def write(jobs: list[StagedJob], *, using: str) -> None:
    """Write rows by one INSERT into the open transaction, and have the drainers woken after its commit.

    Raises:
        InvalidJob: A row is larger than the database's packet.
    """
    from ..models import StagedJob

    _check_packet(jobs, using=using)
    with transaction.atomic(using=using, savepoint=False):
        StagedJob.objects.using(using).bulk_create(jobs, batch_size=CHUNK_ROWS)
        wake_after_commit(using)
    jobs_staged.send_robust(StagedJob, using=using, jobs=jobs)


def outbox_alias() -> str:
    """Return the alias that the outbox lives on: the setting, else what the routers say."""
    from ..models import StagedJob

    return settings().DATABASE or router.db_for_write(StagedJob)


def shard_of(ordering_key: str, task_id: str) -> int:
    """Return the shard of a job: CRC-32 (as in zlib) of its key, or of its task id where it has none."""
    return crc32((ordering_key or task_id).encode()) % SHARDS


def _chunks(jobs: list[StagedJob]) -> Iterator[list[StagedJob]]:
    chunk: list[StagedJob] = []
    size = 0
    for job in jobs:
        if chunk and (len(chunk) >= CHUNK_ROWS or size + job.size > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(job)
        size += job.size
    if chunk:
        yield chunk


def _check_packet(jobs: list[StagedJob], *, using: str) -> None:
    # MySQL cuts the connection, and with it the caller's transaction, when a statement is larger
    # than its packet. Escaping may double the bytes. Only large rows are worth the question.
    connection = connections[using]
    largest = max(job.size for job in jobs)
    if connection.vendor != "mysql" or largest <= CHUNK_BYTES:
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        packet = cursor.fetchone()[0]
    if 2 * largest + 64 * 1024 > packet:
        raise InvalidJob(
            f"A message of {largest} bytes may not fit max_allowed_packet={packet} of database "
            f"{using!r}, which must hold twice its size. Raise the server's setting, or store the data "
            "elsewhere and pass its key."
        )
