"""A process's list of a service's servers. A thread pulls it, and is woken by changes.

A caller waits for the registry only until the first list is there. If more than half of the servers
are missing in one pull, the fault is probably in the registry, not in the servers. So the missing
servers stay listed for a minute; if a server is really down, its callers eject it. While the
registry is unavailable, the last list is used. Only one thread pulls a list, so that an older list
never replaces a newer one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..door.peers import address_fault
from ..text import get_logger
from .registry import SERVER, Member, Registry, RegistryThread

logger = get_logger("outbox_app.fleet")

#: Seconds for which servers stay listed after more than half of them were missing in one pull.
KEEP = 60.0


@dataclass(frozen=True, slots=True)
class Listing:
    """Servers in the order of address. Those that the registry has lost may be kept for a while."""

    servers: tuple[Member, ...] = ()
    kept: frozenset[str] = frozenset()
    kept_since: float | None = None
    #: Why the last pull failed; empty if it did not fail.
    trouble: str = ""

    def after(self, found: Iterable[Member], now: float) -> Listing:
        """Return the list after a pull that found these members."""
        called = [each for each in found if each.kind == SERVER and _is_called_at(each.address)]
        new = {each.address: each for each in sorted(called, key=_strength)}
        gone = [each for each in self.servers if each.address not in new]
        since = now if self.kept_since is None else self.kept_since
        keeps = 2 * len(gone) > len(self.servers) and now - since < KEEP
        kept = frozenset(each.address for each in gone) if keeps else frozenset()
        new |= {each.address: each for each in gone if each.address in kept}
        servers = tuple(new[address] for address in sorted(new))
        return Listing(servers, kept, since if keeps else None)


def _strength(member: Member) -> tuple[int, str]:
    """Sort processes at one address: the last one, with the highest weight, is listed."""
    return (0 if member.draining else member.weight, str(member.id))


@lru_cache(maxsize=1024)  # logged once, and not with each pull
def _is_called_at(address: str) -> bool:
    if fault := address_fault(address):
        logger.warning(
            "Server left out, its address is invalid address=%s reason=%s", address, fault
        )
    return not fault


class Watch(RegistryThread):
    """The list of one service, and the thread that pulls it."""

    is_woken = True

    def __init__(self, service: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(f"outbox-watch-{service}")
        self.service = service
        self.clock = clock
        self._listing = Listing()
        self._pulled = threading.Event()
        self.thread.start()

    def listing(self, seconds: float = 0) -> Listing:
        """Return the present list; wait for the first one for at most so many seconds."""
        self._pulled.wait(seconds)
        return self._listing

    def step(self, registry: Registry) -> None:
        self._listing = self._listing.after(registry.members(self.service), self.clock())
        self._pulled.set()

    def failed(self, error: BaseException) -> None:
        super().failed(error)
        # Servers that are missing when the registry is back are kept for a full minute.
        self._listing = replace(self._listing, trouble=self.backoff.text, kept_since=None)
        self._pulled.set()
