"""Running the check-back in the foreground: what ``manage.py run_prepared`` calls.

After SIGTERM or SIGINT a process takes the answers that have arrived, and releases its senders.
Several processes share the senders.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..aliases import outbox_alias
from ..process.foreground import (
    Listen,
    prepare_process,
    progress,
    require_at_least,
    run_workers,
    stop_on_signals,
)
from ..text import get_logger
from .checking_back import CheckBack
from .models import PreparedEvent

logger = get_logger("outbox_app.prepared")


def run(
    *,
    using: str | None = None,
    interval: float | None = None,
    once: bool = False,
    processes: int = 1,
) -> int:
    """Ask senders until SIGTERM or SIGINT, or with ``once`` until nothing is due.

    Returns:
        An exit code: 1 if a process died, or with ``once`` if a sender gave no answer; else 0.
    """
    require_at_least(processes=(processes, 1), interval=(interval, 0.01))
    using = using or outbox_alias()
    prepare_process(using, PreparedEvent)
    work = partial(ask_here, using, interval=interval, once=once)
    return run_workers(work, count=processes, restart=not once)


def ask_here(
    using: str,
    *,
    interval: float | None = None,
    once: bool,
    parent: int | None = None,
    listen: Listen = stop_on_signals,
) -> int:
    """Ask senders in this thread; ``listen`` gets the function that stops it."""
    loop = CheckBack(using=using, interval=interval, on_turn=progress(_progress, parent=parent))
    listen(loop.stop)
    logger.info("Check-back started database=%s", using)
    decided = loop.run(once=once)
    loop.report("Check-back stopped decided=%d", decided)
    return int(once and bool(loop.trouble))


def _progress(loop: CheckBack, rate: float) -> tuple[Any, ...]:
    return "Check-back running rate=%s/s decided=%d", rate, loop.done
