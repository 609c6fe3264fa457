"""Running subscriptions in the foreground: what ``manage.py run_subscriptions`` calls.

Several processes share the partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from django.db import connections

from ...exceptions import InvalidArgument
from ...process.foreground import (
    Listen,
    prepare_process,
    progress,
    require_at_least,
    run_workers,
    set_timeouts,
    stop_on_signals,
)
from ...text import get_logger
from ..exceptions import UnknownSubscription
from ..models import Subscription
from .runner import ANSWER_SECONDS, Runner
from .subscriber import Subscriber, all_subscribers, subscriber_named

logger = get_logger("outbox_app.events.subscriptions")

Beside = Callable[..., AbstractContextManager[None]]


def run(
    names: Sequence[str] = (),
    *,
    using: str | None = None,
    interval: float | None = None,
    batch_size: int | None = None,
    once: bool = False,
    processes: int = 1,
    beside: Beside | None = None,
) -> int:
    """Run subscriptions in the foreground until SIGTERM or SIGINT, or until ``once`` is done.

    By default all declared subscriptions run, with the intervals and page sizes of the settings. If
    they are on several aliases, ``using`` chooses one. ``beside``, called with that alias and
    ``once``, returns a context manager that is open meanwhile. Returns an exit code: 0; 1 if a
    process died, or if, with ``once``, a subscription has stopped or cannot run.
    """
    require_at_least(
        batch_size=(batch_size, 1), processes=(processes, 1), interval=(interval, 0.01)
    )
    chosen = choose(names, using)
    faults = [] if names else [each.fault for each in all_subscribers() if each.fault]
    for fault in faults:
        logger.warning("Subscription left out reason=%s", fault)
    prepare_process(chosen[0].using, Subscription, answer_seconds=ANSWER_SECONDS)
    work = partial(
        run_here, chosen, once=once, beside=beside, interval=interval, batch_size=batch_size
    )
    code = run_workers(work, count=processes, restart=not once)
    return code or int(once and bool(faults))


def choose(names: Sequence[str], using: str | None) -> list[Subscriber]:
    """Return the subscriptions of these names on one alias; by default those that can run."""
    chosen = [subscriber_named(name) for name in names] if names else all_subscribers()
    if not chosen:
        raise UnknownSubscription(
            "There is no subscription to run. Declare one with @subscriber in a module named "
            "subscribers of an installed app."
        )
    if not names:  # a faulty subscription stops no other
        chosen = [each for each in chosen if not each.fault] or chosen
    aliases = {each.using for each in chosen}
    known = ", ".join(sorted(aliases))
    if using and using not in aliases:
        text = f"No subscription is on {using!r}: each is on the alias of its logs, {known}."
        raise UnknownSubscription(text)
    if not using and len(aliases) > 1:
        text = f"The subscriptions are on {known}: run one process for each, with --database."
        raise InvalidArgument(text)
    return [each for each in chosen if using in (None, each.using)]


def run_here(
    chosen: list[Subscriber],
    *,
    once: bool,
    parent: int | None = None,
    listen: Listen = stop_on_signals,
    beside: Beside | None = None,
    **options: Any,
) -> int:
    """Run subscriptions of one database in this thread; ``listen`` gets their stop function."""
    replicas = {each.read_from for each in chosen if each.read_from}
    for alias in replicas.intersection(connections):
        set_timeouts(alias, answer_seconds=ANSWER_SECONDS)
    runner = Runner(chosen, **options, on_turn=progress(_progress, parent=parent))
    listen(runner.stop)
    names = ",".join(each.name for each in chosen)
    logger.info("Subscriptions started database=%s names=%s", runner.using, names)
    with beside(runner.using, once=once) if beside else nullcontext():
        handled = runner.run(once=once)
    runner.report("Subscriptions stopped handled=%d", handled)
    return int(once and bool(runner.trouble))


def _progress(runner: Runner, rate: float) -> tuple[Any, ...]:
    return "Subscriptions running rate=%s/s handled=%d", rate, runner.done
