"""Registers a process in the registry: it registers when it starts, and leaves before it ends.

Its first request would be too late: until a server is registered, it gets no request. A process
that only calls registers as a client, with its first call. SIGTERM first takes the process off the
registry, and then ends it as before. A process that was suspended for longer than its lease
registers again, under another id, and is still draining if it was. A forked child does not register
itself.
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

from ..capability import require_app
from ..conf import outbox_settings
from ..text import get_logger
from .conf import fleet_settings
from .registry import CLIENT, SERVER, Member, Registry, RegistryThread

logger = get_logger("outbox_app.fleet")

#: Seconds for which a process that ends waits for the registry.
AT_EXIT = 2.0
Application = Callable[..., Awaitable[None]]


def register(application: Application) -> Application:
    """Answer the lifespan protocol of ASGI: register on startup, leave on shutdown.

    Args:
        application: The application for all other scopes, such as ``get_asgi_application()``.
    """

    async def registered(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await application(scope, receive, send)
            return
        while (await receive())["type"] == "lifespan.startup":
            join()
            await send({"type": "lifespan.startup.complete"})
        await asyncio.to_thread(leave)
        await send({"type": "lifespan.shutdown.complete"})

    return registered


class Registration(RegistryThread):
    """The entry of a process in the registry, and the thread that keeps it alive."""

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
            logger.warning("Server stays in the registry until its lease runs out error=%s", error)

    def step(self, registry: Registry) -> None:
        if found := registry.beat(self.member):
            self.member = found
            return
        # Use a new id, but keep the weight and the draining that were set from outside.
        self.member = replace(self.member, id=uuid4())
        registry.register(self.member)
        logger.info("Server registered kind=%s address=%s", self.member.kind, self.member.address)


_lock = threading.Lock()
#: The registration of this process.
_registration: Registration | None = None


def join() -> None:
    """Register this process: as a server if it has an address, else as a client."""
    register_as(SERVER if fleet_settings().ADDRESS else CLIENT)
    if threading.current_thread() is threading.main_thread():
        _leave_on(signal.SIGTERM)


def register_as(kind: str) -> None:
    """Register this process as a server or a client. A server does not become a client."""
    global _registration
    if not fleet_settings().SERVICE:
        return
    require_app("outbox_app.fleet")
    with _lock:
        before = _registration
        if before is None or (before.member.kind, kind) == (CLIENT, SERVER):
            begun = Registration(kind)
            begun.thread.start()  # if it cannot start, the next call tries again
            _registration = begun
            if before is not None:
                before.stop.set()


def leave() -> None:
    """Take this process off the registry; wait up to ``AT_EXIT`` seconds for that."""
    global _registration
    if (registration := _registration) is not None:
        _registration = None
        registration.stop.set()
        registration.thread.join(AT_EXIT)


def _leave_on(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    if before is None:  # a handler that a server has set in C: ours could not call it
        return

    def handle(signal_number: int, frame: Any) -> None:
        if _registration is not None:
            _registration.stop.set()
        if callable(before):
            before(signal_number, frame)
        elif before == signal.SIG_DFL:  # let the signal end the process
            leave()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(number, handle)


def _after_fork() -> None:
    global _lock, _registration
    _lock, _registration = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)
atexit.register(leave)
