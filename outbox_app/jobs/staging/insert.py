"""INSERTs of staged rows into the caller's transaction.

The rows of one call (a group, ``stage_many``) are collected and written at the end of the outermost
block, by one INSERT per chunk: if one row of a call is refused, none is written. A row staged in a
savepoint inside such a block is written at once, ahead of the collected rows, so that a rollback of
the savepoint removes it. If an INSERT fails (after a lock timeout, for example), Django marks the
open transaction for rollback, so the business row cannot be committed without the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any
from zlib import crc32

from django.db import connections, transaction

from ...conf import SHARDS
from ...database.transactions import require_table, send_inside
from ...exceptions import InvalidJob
from ...process.wakeup import JOBS, wake_after_commit
from ...signals import jobs_staged
from ..context import let

if TYPE_CHECKING:  # a project's celery.py is imported before Django's models may be
    from django.db.backends.base.base import BaseDatabaseWrapper

    from ...models import StagedJob

#: A multi-row INSERT ends at this many rows or bytes, whichever comes first.
CHUNK_ROWS = 1000
CHUNK_BYTES = 1024 * 1024
#: So many bytes fit the packet of a MySQL server even if that is configured to be very small.
ASK_BYTES = 256 * 1024
#: From so many rows on, PostgreSQL takes them by COPY, which costs one round trip more.
COPY_ROWS = 10

_size = attrgetter("size")


class StagedBatch:
    """Rows of one call that are not written yet.

    With ``streaming`` each full chunk is written at once; the caller then holds a savepoint, so
    that all rows of the call can be undone. A call inside another one has a batch of its own, which
    goes to the ``outer`` batch when the call ends, so that a refused call adds no rows.
    """

    def __init__(self, *, streaming: bool = False, outer: StagedBatch | None = None) -> None:
        self.streaming = streaming
        #: The thread that collects the rows; None once they are written.
        self.thread: int | None = get_ident()
        self.waiting: dict[str, list[StagedJob]] = {}
        self.bytes = 0
        #: The ``StagingProducer`` of the last job that Celery has made.
        self.latest: Any = None
        self._savepoints: dict[str, tuple[bool, list[str]]] = (
            outer._savepoints
            if outer
            else {c.alias: _savepoint_of(c) for c in connections.all(initialized_only=True)}
        )

    def add(self, jobs: list[StagedJob], *, using: str) -> None:
        if _savepoint_of(connections[using]) != self._savepoints.get(using, (False, [])):
            write(jobs, using=using)
            return
        if self.streaming:
            size = sum(map(_size, jobs))
            rows = len(self.waiting.get(using, ()))
            if rows >= CHUNK_ROWS or self.bytes + size > CHUNK_BYTES:
                self.write()
            self.bytes += size
        self.waiting.setdefault(using, []).extend(jobs)

    def write(self) -> None:
        """Write the collected rows."""
        waiting, self.waiting, self.bytes = self.waiting, {}, 0
        for using, jobs in waiting.items():
            write(jobs, using=using)


def _savepoint_of(connection: BaseDatabaseWrapper) -> tuple[bool, list[str]]:
    """Return whether a transaction is open on a connection, and inside which savepoints."""
    return connection.in_atomic_block, [sid for sid in connection.savepoint_ids if sid]


_current_batch: ContextVar[StagedBatch | None] = ContextVar("outbox_app_batch", default=None)


@contextmanager
def batching(*, streaming: bool = False) -> Iterator[None]:
    """Collect the rows staged inside; write them when the outermost block ends without an error."""
    outer = open_batch()
    batch = StagedBatch(streaming=streaming and outer is None, outer=outer)
    try:
        with let(_current_batch, batch):
            yield
    finally:
        batch.thread = None
    if outer is None:
        batch.write()
    else:
        outer.latest = batch.latest
        for using, jobs in batch.waiting.items():
            outer.add(jobs, using=using)


def open_batch() -> StagedBatch | None:
    """Return the batch of this call. A thread, or a task that goes on, may have a copy of it."""
    batch = _current_batch.get()
    return batch if batch and batch.thread == get_ident() else None


def collect_in(batch: StagedBatch) -> None:
    """Collect the rows staged from here to the end of the context; the caller writes them."""
    _current_batch.set(batch)


def add(job: StagedJob, *, using: str, by: Any = None) -> None:
    if batch := open_batch():
        batch.latest = by
        batch.add([job], using=using)
    else:
        write([job], using=using)


def write(jobs: list[StagedJob], *, using: str, with_ids: bool = False) -> None:
    """Write rows into the open transaction, one INSERT per chunk; wake drainers after its commit.

    ``with_ids``: set the ids of the jobs.
    """
    from ...models import StagedJob

    require_table(StagedJob, using=using)
    limit = chunk_bytes(jobs, using=using)
    rows = min(CHUNK_ROWS, connections[using].ops.bulk_batch_size(_WRITTEN, jobs))
    with transaction.atomic(using=using, savepoint=False):
        batch = None
        if any(job.is_immediate for job in jobs):
            from ..immediate import hold, publish_after_commit

            batch = hold(jobs, using=using)
        for chunk in chunks(jobs, rows=rows, bytes=limit, size=_size):
            (_insert_with_ids if batch or with_ids else _insert)(chunk, using=using)
        if batch:
            publish_after_commit(batch, jobs)
        if not all(job.is_immediate for job in jobs):
            wake_after_commit(using, JOBS)
    send_inside(jobs_staged, StagedJob, using, using=using, jobs=jobs)


def _insert_with_ids(jobs: list[StagedJob], *, using: str) -> None:
    rows: Any = type(jobs[0])._default_manager.using(using)
    if len(jobs) > 1 and not connections[using].features.can_return_rows_from_bulk_insert:
        rows.bulk_create(jobs)
        if jobs[0].pk is None:  # MySQL has no RETURNING
            from ...database.upsert import last_inserted

            with connections[using].cursor() as cursor:
                ids = last_inserted(cursor, type(jobs[0]), ["id"], len(jobs))
            for job, (id,) in zip(jobs, ids, strict=True):
                job.pk = id
        return
    unwritten = {"id", "staged_at", "sent_at", "publishes"}
    if all(job.receipt is None for job in jobs):
        unwritten.add("receipt")
    fields = [f for f in jobs[0]._meta.concrete_fields if f.name not in unwritten]
    ids = rows._insert(jobs, fields=fields, using=using, returning_fields=[jobs[0]._meta.pk])
    for job, (id,) in zip(jobs, ids, strict=True):
        job.pk = id


def _insert(jobs: list[StagedJob], *, using: str) -> None:
    """Insert rows without reading their ids, in less than half of the time of a queryset."""
    from ...database.copying import copies, copy_rows
    from ...database.upsert import insert_rows

    connection: Any = connections[using]
    if len(jobs) >= COPY_ROWS and copies(connection, type(jobs[0])):
        with connection.cursor() as cursor:
            copy_rows(cursor, type(jobs[0]), _COPIED, map(attrgetter(*_COPIED), jobs))
        return
    binary = "_binary %s" if connection.vendor == "mysql" else "%s"
    receipt = ("receipt",) if any(job.receipt is not None for job in jobs) else ()
    row = f"({', '.join([*['%s'] * len(_PLAIN), binary, *['%s'] * (1 + len(receipt))])})"
    values: list[Any] = []
    for job in jobs:
        body = connection.Database.Binary(job.body)
        held = connection.ops.adapt_datetimefield_value(job.available_at)
        values += [*_plain(job), body, held, *(job.receipt for _ in receipt)]
    with connection.cursor() as cursor:
        insert_rows(cursor, type(jobs[0]), (*_WRITTEN, *receipt), values, row=row)


_PLAIN = ("shard", "ordering_key", "app", "task", "task_id", "queue", "envelope")
_WRITTEN = (*_PLAIN, "body", "available_at")
_COPIED = (*_WRITTEN, "receipt")
_plain = attrgetter(*_PLAIN)


def shard_of_job(ordering_key: str, task_id: str) -> int:
    """Return the shard of a job: CRC-32 (zlib's) of the ordering key, else of the task id."""
    return crc32((ordering_key or task_id).encode()) % SHARDS


def chunks(
    items: Iterable[Any], *, rows: int, bytes: int, size: Callable[[Any], int]
) -> Iterator[list[Any]]:
    """Cut items into chunks of limited rows and bytes; a larger item is a chunk by itself."""
    chunk: list[Any] = []
    total = 0
    for item in items:
        total += (own := size(item))
        if chunk and (len(chunk) >= rows or total > bytes):
            yield chunk
            chunk, total = [], own
        chunk.append(item)
    if chunk:
        yield chunk


def chunk_bytes(jobs: Sequence[Any], *, using: str) -> int:
    """Return how many bytes one INSERT may hold.

    MySQL closes the connection, and with it the caller's transaction, if a statement is larger than
    its packet. Escaping may double the bytes. The limit is only queried for large amounts of data.
    """
    connection = connections[using]
    if connection.vendor != "mysql" or sum(map(_size, jobs)) <= ASK_BYTES:
        return CHUNK_BYTES
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        packet: int = cursor.fetchone()[0]
    largest = max(jobs, key=_size)
    if 2 * largest.size + 16 * 1024 > packet:
        raise InvalidJob(
            f"The message of {largest} is {largest.size} bytes, and the packet of database "
            f"{using!r}, which must hold twice its size, {packet} (max_allowed_packet). Raise the "
            "server's setting, or store the data elsewhere and pass its key."
        )
    return min(CHUNK_BYTES, packet // 5)
