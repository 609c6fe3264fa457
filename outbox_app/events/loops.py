"""The loops of events in ``run_outbox``, and the sinks beside ``run_subscriptions``.

Subscriptions of one alias share a loop. A sink only cleans up: it runs last, and a stop does not
wait for it for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..capability import Loop
from ..process.foreground import Listen, prepare_process
from ..retention.run import retain_here
from ..supervisor import LoopThread, join, start
from ..text import get_logger
from .log.registry import sinks
from .models import Subscription
from .sink import Sink
from .subscriptions.run import run_here
from .subscriptions.runner import ANSWER_SECONDS
from .subscriptions.subscriber import Subscriber, all_subscribers

logger = get_logger("outbox_app.process")


def loops(only: str | None) -> dict[str, Loop]:
    """Return a loop for the subscriptions of each alias, or of one, and one for each sink."""
    by_alias: dict[str, list[Subscriber]] = {}
    for each in all_subscribers():
        if each.fault:
            logger.warning("Subscription left out reason=%s", each.fault)
        elif only in (None, each.using):
            by_alias.setdefault(each.using, []).append(each)
    found = {
        f"subscriptions {alias}": Loop(partial(_handle, chosen))
        for alias, chosen in by_alias.items()
    }
    return found | _sinks(only)


def _handle(chosen: list[Subscriber], *, once: bool, listen: Listen) -> int:
    prepare_process(chosen[0].using, Subscription, answer_seconds=ANSWER_SECONDS)
    return run_here(chosen, once=once, listen=listen, interval=None, batch_size=None)


def _sinks(using: str | None) -> dict[str, Loop]:
    return {
        f"sink {log._meta.db_table}": Loop(partial(retain_here, partial(Sink, log)), cleanup=True)
        for log in sinks(using)
    }


@contextmanager
def sinking(using: str, *, once: bool) -> Iterator[None]:
    """While the block runs, or with ``once`` after it, remove archived events of logs that sink."""
    threads = [LoopThread(name, loop) for name, loop in _sinks(using).items()]
    if once:
        yield
        for thread in threads:
            thread.attempt(once=True)
        return
    start(threads)
    try:
        yield
    finally:
        for thread in threads:
            thread.stop()
        join(threads)
