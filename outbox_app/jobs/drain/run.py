"""Running drainers in the foreground: what ``manage.py drain_outbox`` calls.

SIGTERM and SIGINT finish the batch in hand and hand the shards back. With several processes the
parent passes a stop on, and starts a new drainer for each that dies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...aliases import outbox_alias
from ...conf import outbox_settings
from ...exceptions import InvalidArgument, UnsafeBroker
from ...process.foreground import bound_waits, in_children
from ...process.sessions import require_sessions
from ...process.tables import require_alias, require_tables
from ...text import get_logger
from .drain import Drain
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
    for name, value, least in (
        ("--batch-size", batch_size, 1),
        ("--processes", processes, 1),
        ("--max-jobs", max_jobs, 1),
        ("--interval", interval, 0.01),
    ):
        if value is not None and not value >= least:  # NaN too
            raise InvalidArgument(f"{name} must be at least {least}; got {value}.")
    using = using or outbox_alias()
    require_alias(using)
    bound_waits(using)
    require_tables(using)
    require_sessions(using, write=write)
    options: dict[str, Any] = {
        "using": using,
        "interval": interval,
        "batch_size": batch_size,
        "max_jobs": max_jobs,
    }
    if processes == 1:
        return _drain_here(options, once=once, write=write)
    return in_children(
        partial(_drain_here, options, once=once, write=write),
        count=processes,
        restart=not once,
        final=EXIT_UNSAFE,
        write=write,
    )


def _drain_here(
    options: dict[str, Any],
    *,
    once: bool,
    write: Callable[[str], Any],
    parent: int | None = None,
) -> int:
    progress = Progress(write)

    def on_turn(drainer: Drain) -> None:
        progress(drainer)
        if parent is not None and os.getppid() != parent:
            drainer.stop()  # killed: nobody is left to pass a stop on

    drainer = Drain(**options, on_turn=on_turn)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: drainer.stop())
    write(
        f"drainer started database={drainer.using} batch_size={drainer.batch_size} "
        f"interval={drainer.interval:g}"
    )
    try:
        drainer.open_brokers()
        tally = drainer.run(once=once)
    except UnsafeBroker as error:
        write(f"unsafe broker: {error}")
        return EXIT_UNSAFE
    waiting = f" held={held(using=drainer.using).rows}" if once else ""
    write(f"drainer stopped published={tally.published} dead={tally.dead}{waiting}")
    return EXIT_OK


class Progress:
    """Writes a line every PROGRESS_INTERVAL seconds: rate, backlog, age of the oldest row."""

    def __init__(self, write: Callable[[str], Any]) -> None:
        self.write = write
        self.interval = outbox_settings().PROGRESS_INTERVAL
        self.at = time.monotonic()
        self.done = 0

    def __call__(self, drainer: Drain) -> None:
        """Write a line, if it is time."""
        now = time.monotonic()
        if not self.interval or now - self.at < self.interval:
            return
        done = drainer.tally.done
        if done == self.done and not drainer.trouble:
            self.at = now
            return
        rate = (done - self.done) / (now - self.at)
        self.at, self.done = now, done
        if drainer.trouble:
            self.write(f"waiting published={drainer.tally.published} trouble={drainer.trouble}")
            return
        waiting = backlog(using=drainer.using)
        self.write(
            f"draining rate={rate:.0f}/s published={drainer.tally.published} "
            f"backlog={waiting.shown} oldest={waiting.oldest_seconds:.1f}s "
            f"dead={drainer.tally.dead}"
        )
