"""The list of a service's servers, as this process knows it: pulled by a thread, woken by changes.

A caller never waits for the registry, but for the first list. A list that is pulled is not believed
when more than half of the servers are gone in one step: that is trouble of the registry, not of
the servers, so those stay listed for a minute, and who is really away is ejected by its callers.
While the registry is away the last list stays. One thread pulls a list, so that an older one never
replaces a newer one; ``revision`` counts its changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from django.db import connections

from ..door.peers import address_fault
from ..process.backoff import Backoff
from ..process.waiting import StopFlag
from ..text import get_logger
from .announcing import pause
from .registry import SERVER, Member, Registry, new_registry

logger = get_logger("outbox_app.fleet")

#: Seconds for which servers stay listed that were gone together.
KEEP = 60.0


@dataclass(frozen=True, slots=True)
class Listing:
    """Servers by their addresses; which of them are kept although the registry has them no more."""

    servers: tuple[Member, ...] = ()
    revision: int = 0
    kept: frozenset[str] = frozenset()
    kept_since: float | None = None
    #: Why the registry could not be asked; empty when it was.
    trouble: str = ""

    def after(self, found: Iterable[Member], now: float) -> Listing:
        """Return the list after a pull."""
        new = {each.address: each for each in sorted(found, key=_strength) if _is_server(each)}
        gone = [each for each in self.servers if each.address not in new]
        since = now if self.kept_since is None else self.kept_since
        keeps = 2 * len(gone) > len(self.servers) and now - since < KEEP
        kept = frozenset(each.address for each in gone) if keeps else frozenset()
        new |= {each.address: each for each in gone if each.address in kept}
        servers = tuple(new[address] for address in sorted(new))
        changed = servers != self.servers
        return Listing(servers, self.revision + changed, kept, since if keeps else None)


def _strength(member: Member) -> tuple[int, str]:
    """Of several processes at one address the one that takes most, whichever it is, stands."""
    return (0 if member.draining else member.weight, str(member.id))


def _is_server(member: Member) -> bool:
    if member.kind != SERVER:
        return False
    if fault := address_fault(member.address):
        logger.warning("Server left out: its address %s address=%s", fault, member.address)
    return not fault


class Watch:
    """The list of one service, and the thread that pulls it."""

    def __init__(
        self,
        service: str,
        *,
        registry: Callable[[], Registry] = new_registry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self.clock = clock
        self.stop = StopFlag()
        self._registry = registry
        self._listing = Listing()
        self._pulled = threading.Event()
        name = f"outbox-watch-{service}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def listing(self, seconds: float = 0) -> Listing:
        """Return the list as it is known; wait for the first one for so many seconds at most."""
        self._pulled.wait(seconds)
        return self._listing

    def _run(self) -> None:
        backoff = Backoff("the registry", logger)
        while not self.stop.is_set():
            try:
                registry = self._registry()
                with registry.session(self.stop) as waiter:
                    while not self.stop.is_set():
                        self._pull(registry, backoff)
                        self._pulled.set()
                        waiter.wait(pause())
            except Exception as error:  # no session: a thread of its own cannot be started
                self._failed(error, backoff)
                self._pulled.set()
                self.stop.wait(pause())

    def _pull(self, registry: Registry, backoff: Backoff) -> None:
        try:
            found = registry.members(self.service)
            self._listing = self._listing.after(found, self.clock())
            backoff.succeeded()
        except Exception as error:  # each registry has errors of its own
            self._failed(error, backoff)

    def _failed(self, error: Exception, backoff: Backoff) -> None:
        backoff.failed(error)
        connections.close_all()
        # What is gone when it is back is kept from then on.
        self._listing = replace(self._listing, trouble=backoff.text, kept_since=None)
