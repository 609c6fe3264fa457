"""Running drainers in the foreground: what ``manage.py drain_outbox`` calls.

SIGTERM and SIGINT finish the batch in progress and hand the shards back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import django.db
from django.db import connections

from ...aliases import outbox_alias
from ...database.lock_wait import codes_of
from ...exceptions import UnfitSession, UnsafeBroker
from ...process.foreground import (
    Listen,
    prepare_process,
    progress,
    require_at_least,
    run_workers,
    stop_on_signals,
)
from ...text import get_logger
from .batch import delete
from .drain import Drain
from .misconfiguration import without_batches
from .status import backlog, held

logger = get_logger("outbox_app.drain")

EXIT_UNSAFE = 3


def drain_outbox(
    *,
    using: str | None = None,
    interval: float | None = None,
    batch_size: int | None = None,
    once: bool = False,
    processes: int = 1,
    max_jobs: int | None = None,
) -> int:
    """Drain until SIGTERM or SIGINT, or with ``once`` until the rows that exist now have left.

    Args:
        using, interval, batch_size, max_jobs: Arguments of each ``Drain``.
        processes: The number of drainers, each in a process of its own.

    Returns:
        An exit code: 0; 1 if a drainer process died, or with ``once`` if a broker or the database
        failed; 3 if the broker is unsafe.

    Raises:
        InvalidArgument, NotMigrated, UnfitSession: It cannot begin.
    """
    require_at_least(
        batch_size=(batch_size, 1),
        processes=(processes, 1),
        max_jobs=(max_jobs, 1),
        interval=(interval, 0.01),
    )
    using = using or outbox_alias()
    prepare_process(using)
    if processes > 1:  # a worker that refuses would be started again and again
        _require_deletes(using)
    options: dict[str, Any] = {"interval": interval, "batch_size": batch_size}
    work = partial(drain_here, using, once=once, max_jobs=max_jobs, **options)
    return run_workers(work, count=processes, restart=not once, final=EXIT_UNSAFE)


def drain_here(
    using: str,
    *,
    once: bool,
    parent: int | None = None,
    listen: Listen = stop_on_signals,
    **options: Any,
) -> int:
    """Run one drainer with ``options``; ``listen`` gets the function that stops it."""
    drainer = Drain(using=using, **options, on_turn=progress(_progress, parent=parent))
    listen(drainer.stop)
    if parent is None:
        _require_deletes(using)
    begun = "Drainer started database=%s batch_size=%d interval=%g"
    logger.info(begun, using, drainer.batch_size, drainer.interval)
    if slow := without_batches():
        logger.warning("Drainer is slow reason=%s", slow)
    try:
        drainer.open_brokers()
        tally = drainer.run(once=once)
    except UnsafeBroker as error:
        logger.error("Broker is unsafe error=%s", error)
        return EXIT_UNSAFE
    stopped = "Drainer stopped published=%d dead=%d"
    if once and drainer.has_failed:
        logger.error(stopped + " trouble=%s", tally.published, tally.dead, drainer.trouble)
        return 1
    if once:
        left = held(using=using).rows
        logger.info(stopped + " held=%d", tally.published, tally.dead, left)
    else:
        logger.info(stopped, tally.published, tally.dead)
    return 0


def _require_deletes(using: str) -> None:
    """Refuse a user who may read jobs and not delete them: each start would publish them again."""
    try:
        delete([(0, "")], using=using)  # as after a batch; no row has this id
    except django.db.Error as error:
        connections[using].close()
        if {"42501", 1142} & codes_of(error):
            raise UnfitSession(
                f"Published jobs could not be deleted: {error}. Grant the user of {using!r} "
                "SELECT, UPDATE and DELETE on outbox_stagedjob."
            ) from error


def _progress(drainer: Drain, rate: float) -> tuple[Any, ...]:
    tally = drainer.tally
    if drainer.trouble:
        return "Drainer waiting published=%d", tally.published
    waiting = backlog(using=drainer.using)
    draining = "Drainer running rate=%s/s published=%d backlog=%s oldest=%.1fs dead=%d"
    return draining, rate, tally.published, waiting.shown, waiting.oldest_seconds, tally.dead
