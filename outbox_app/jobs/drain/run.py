"""Running drainers in the foreground: what ``manage.py drain_outbox`` calls.

SIGTERM and SIGINT finish the batch in progress and hand the shards back. With several processes the
parent passes a stop on, and starts a new drainer for each that dies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...aliases import outbox_alias
from ...exceptions import UnsafeBroker
from ...process.foreground import Progress, prepare, require_at_least, run_workers, stop_on_signals
from ...text import get_logger
from .drain import Drain
from .misconfiguration import without_batches
from .status import backlog, held

logger = get_logger("outbox_app.drain")

EXIT_OK, EXIT_UNSAFE = 0, 3


def drain_outbox(
    *,
    using: str | None = None,
    interval: float | None = None,
    batch_size: int | None = None,
    once: bool = False,
    processes: int = 1,
    max_jobs: int | None = None,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Drain in the foreground until SIGTERM or SIGINT, or until ``once`` is done.

    Args:
        using: Database alias. Default: the outbox's.
        interval: Seconds between two polls while idle. Default: the setting.
        batch_size: Rows of a batch. Default: the setting.
        once: Stop when nothing is left.
        processes: How many drainers, each a process of its own.
        max_jobs: Stop after about so many jobs, in each process.
        write: Takes progress lines.

    Returns:
        An exit code: 0, 1 where a drainer process died, 3 where the broker is unsafe.

    Raises:
        InvalidArgument: An argument is out of bounds, or the alias is unknown.
        NotMigrated: The tables are not there.
        UnfitSession: The database's sessions cannot be used.
    """
    require_at_least(
        batch_size=(batch_size, 1),
        processes=(processes, 1),
        max_jobs=(max_jobs, 1),
        interval=(interval, 0.01),
    )
    using = using or outbox_alias()
    prepare(using, write=write)
    options = {"using": using, "interval": interval, "batch_size": batch_size, "max_jobs": max_jobs}
    return run_workers(
        partial(_drain_here, options, once=once, write=write),
        count=processes,
        restart=not once,
        final=EXIT_UNSAFE,
        write=write,
    )


def _drain_here(
    options: dict[str, Any], *, once: bool, write: Callable[[str], Any], parent: int | None = None
) -> int:
    drainer = Drain(**options, on_turn=Progress(write, _progress, parent=parent))
    stop_on_signals(drainer.stop)
    write(
        f"drainer started database={drainer.using} batch_size={drainer.batch_size} "
        f"interval={drainer.interval:g}"
    )
    if slow := without_batches():
        write(f"drainer is slow: {slow}")
    try:
        drainer.open_brokers()
        tally = drainer.run(once=once)
    except UnsafeBroker as error:
        write(f"unsafe broker: {error}")
        return EXIT_UNSAFE
    waiting = f" held={held(using=drainer.using).rows}" if once else ""
    write(f"drainer stopped published={tally.published} dead={tally.dead}{waiting}")
    return EXIT_OK


def _progress(drainer: Drain, rate: float) -> str:
    tally = drainer.tally
    if drainer.trouble:
        return f"waiting published={tally.published} trouble={drainer.trouble}"
    waiting = backlog(using=drainer.using)
    return (
        f"draining rate={rate:.0f}/s published={tally.published} backlog={waiting.shown} "
        f"oldest={waiting.oldest_seconds:.1f}s dead={tally.dead}"
    )
