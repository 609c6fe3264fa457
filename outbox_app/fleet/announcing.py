"""A process says that it is there: it registers when it starts, and leaves before it ends.

A server is ``announce``d and registers when its process starts, not with its first request: nothing
would ever call it. A process that only calls registers as a client, with its first call. A daemon
thread keeps the row, with a connection of its own; it waits for a registry that is away. SIGTERM
takes the process off first, and then goes on to end it as before. A process that was stopped for
longer than its lease registers anew, under another id, and is drained if it was. A fork announces
nothing by itself.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from ..conf import fleet_settings, outbox_settings
from ..text import get_logger
from .registry import CLIENT, SERVER, Member, Registry, RegistryThread

logger = get_logger("outbox_app.fleet")

#: Seconds that a process which ends gives the registry.
AT_EXIT = 2.0
Application = Callable[..., Awaitable[None]]


def announce(application: Application) -> Application:
    """Answer the lifespan protocol of ASGI: register on startup, leave on shutdown.

    Args:
        application: What gets everything else, such as ``get_asgi_application()``.
    """

    async def announced(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        while (await receive())["type"] == "lifespan.startup":
            join()
            await send({"type": "lifespan.startup.complete"})
        await asyncio.to_thread(leave)
        await send({"type": "lifespan.shutdown.complete"})

    return announced


class Announcement(RegistryThread):
    """The place of a process in the registry, and the thread that keeps it."""

    def __init__(self, kind: str) -> None:
        super().__init__("outbox-fleet")
        conf = fleet_settings()
        self.member = Member(
            service=conf.SERVICE,
            kind=kind,
            address=conf.ADDRESS if kind == SERVER else "",
            weight=conf.WEIGHT,
            lease_seconds=outbox_settings().LEASE_SECONDS,
        )

    def end(self, registry: Registry) -> None:
        try:
            registry.leave(self.member)
        except Exception as error:
            logger.warning("Not taken off, so the lease has to run out error=%r", error)

    def step(self, registry: Registry) -> None:
        if registry.beat(self.member):
            self.member = registry.current(self.member)
            return
        # Under a new id, and as it was drained, or weighed, from outside.
        self.member = replace(self.member, id=uuid4())
        registry.register(self.member)
        logger.info("Registered kind=%s address=%s", self.member.kind, self.member.address)


_lock = threading.Lock()
#: That of this process.
_announced: Announcement | None = None


def join() -> None:
    """Announce this process, as a server where it has an address."""
    join_as(SERVER if fleet_settings().ADDRESS else CLIENT)
    if threading.current_thread() is threading.main_thread():
        _leave_on(signal.SIGTERM)


def join_as(kind: str) -> None:
    """Announce this process as a server or a client, unless it is announced as that, or more."""
    global _announced
    if not fleet_settings().SERVICE:
        return
    with _lock:
        before = _announced
        if before is None or (before.member.kind, kind) == (CLIENT, SERVER):
            begun = Announcement(kind)
            begun.thread.start()  # where it cannot be started, the next call tries again
            _announced = begun
            if before is not None:
                before.stop.set()


def leave() -> None:
    """Take this process off, and wait a moment until that is done."""
    global _announced
    if (announced := _announced) is not None:
        _announced = None
        announced.stop.set()
        announced.thread.join(AT_EXIT)


def _leave_on(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    if before is None:  # of a server in C, which could not be called after ours
        return

    def handle(signal_number: int, frame: Any) -> None:
        if _announced is not None:
            _announced.stop.set()
        if callable(before):
            before(signal_number, frame)
        elif before == signal.SIG_DFL:  # ends the process as it would have ended
            leave()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)


def _after_fork() -> None:
    global _lock, _announced
    _lock, _announced = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
atexit.register(leave)
