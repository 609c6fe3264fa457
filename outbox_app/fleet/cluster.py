"""Calls to a service: to one of its servers, and to another one if that fails.

All attempts share one deadline. A call that was not sent is retried. A call that may have been
executed is retried only if it is repeatable: its id lets the second server find what the first one
has done. An answer is final, also a refusal, unless it is a 502, 503 or 504. Retries of calls that
may have arrived have a budget, a fifth of all calls: or clients would overload a slow fleet.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ..capability import require_app
from ..door import client
from ..door.exceptions import PeerUnavailable
from ..door.peers import Peer, is_name, service_of
from ..exceptions import InvalidArgument
from .balance import Balance, Failing
from .conf import FleetSettings, fleet_settings
from .registration import register_as
from .registry import CLIENT, Member
from .watch import Watch

#: The budget: its window in seconds, retries for each call in it, and retries allowed in any case.
WINDOW, SHARE, LEAST = 10, 0.2, 10
#: Longest pause between two attempts, in seconds.
PAUSE = 0.05
#: The valid values of settings and arguments.
CHOICES = {key: get_args(get_type_hints(FleetSettings)[key]) for key in ("CLUSTER", "BALANCE")}
#: The statuses of a proxy, or of a server that cannot serve requests.
UNAVAILABLE = (502, 503, 504)


class Budget:
    """How many of the calls of the last ``WINDOW`` seconds may be retried."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        #: The times of the calls, and of the retries.
        self._calls: deque[float] = deque()
        self._retries: deque[float] = deque()
        self._lock = threading.Lock()

    def called(self) -> None:
        with self._lock:
            self._recent(self._calls).append(self.clock())

    def take(self) -> bool:
        """Take one retry from the budget; return whether there was one left."""
        with self._lock:
            calls, retries = self._recent(self._calls), self._recent(self._retries)
            if len(retries) >= max(LEAST, SHARE * len(calls)):
                return False
            retries.append(self.clock())
            return True

    def _recent(self, times: deque[float]) -> deque[float]:
        since = self.clock() - WINDOW
        while times and times[0] <= since:
            times.popleft()
        return times


class Known:
    """What the callers of this process share about a service."""

    def __init__(self, service: str) -> None:
        self.watch, self.balance, self.budget = Watch(service), Balance(), Budget()


@dataclass(frozen=True, slots=True)
class Service:
    """A service whose servers are called. It may be kept, and shared by threads."""

    name: str
    cluster: str
    balance: str
    deadline: float

    def call(
        self,
        peer: Peer,
        method: str,
        path: str,
        payload: Any = None,
        *,
        seconds: float | None = None,
        repeatable: bool = True,
        **options: Any,
    ) -> tuple[int, Any]:
        """Return the status and the content of the first answer. Raises ``PeerError``.

        Args:
            peer: The peer whose keys sign the call and verify the answer.
            seconds: The timeout, if it is shorter than the service's deadline.
            repeatable: Whether the call carries an id, or changes nothing.
        """
        known = known_of(self.name)
        until = time.monotonic() + min(self.deadline, seconds or self.deadline)
        known.budget.called()
        listing = known.watch.listing(until - time.monotonic())
        failure = PeerUnavailable(
            f"No server of the service {self.name!r} takes calls. {listing.trouble}".rstrip(),
            sent=False,
        )
        sent = False
        attempts = known.balance.attempts(listing.servers, self.balance)
        # Take a server only if there is time to call it: a trial that is not made ejects it again.
        while (left := until - time.monotonic()) > 0 and (taken := next(attempts, None)):
            server, is_last = taken
            # A server that does not answer must leave time to call another one.
            whole = is_last or not repeatable or self.cluster == "fail_fast"
            is_well = False
            try:
                status, content = client.call(
                    *(peer, method, path, payload),
                    address=server.address,
                    seconds=left if whole else left / 2,
                    **options,
                )
                if status not in UNAVAILABLE:
                    known.balance.succeeded(server.address)
                    return status, content
                # Too many commands wait for one entity: no fault of the server.
                is_well = status == 503 and isinstance(content, dict) and "code" in content
                failure = PeerUnavailable(f"{server.address} has answered {status}.")
            except PeerUnavailable as error:
                failure = error
            if is_well:
                known.balance.succeeded(server.address)
            else:
                known.balance.failed(server.address, str(failure))
            sent = sent or failure.sent
            if is_last or self.cluster == "fail_fast":
                break
            # A request that was not sent is no load for the servers, and needs no budget.
            if failure.sent and not (repeatable and known.budget.take()):
                break
            time.sleep(random.uniform(0, PAUSE))
        failure.sent = sent
        raise failure


def service(name: str, *, cluster: str = "", balance: str = "") -> Service:
    """Return a service. What is not given here is taken from the settings."""
    conf = fleet_settings()
    chosen = {"CLUSTER": cluster or conf.CLUSTER, "BALANCE": balance or conf.BALANCE}
    for key, value in chosen.items():
        if value not in CHOICES[key]:
            raise InvalidArgument(f"{key.lower()} must be one of {CHOICES[key]}; got {value!r}.")
    return Service(_checked(name), chosen["CLUSTER"], chosen["BALANCE"], conf.DEADLINE)


def call(peer: Peer, method: str, path: str, payload: Any = None, **options: Any) -> Any:
    """Call a peer at its address, or at a server of the service that its address names."""
    if name := service_of(peer):
        return service(name).call(peer, method, path, payload, **options)
    return client.call(peer, method, path, payload, **options)


def _checked(name: str) -> str:
    if not is_name(name):
        raise InvalidArgument(
            f"A service needs a name of 1 to 80 characters without colon, slash, space: {name!r}."
        )
    return name


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server as this process knows it."""

    member: Member
    #: Seconds until its ejection ends; 0 if it is not ejected.
    ejected: float
    #: Why its last call failed; empty if it did not fail.
    why: str
    #: Whether it is listed although the registry has lost it, or is unavailable.
    kept: bool


def servers(name: str) -> list[KnownServer]:
    """Return the servers of a service as this process knows them. Waits for the first list."""
    known, now = known_of(_checked(name)), time.monotonic()
    listing = known.watch.listing(fleet_settings().DEADLINE)
    found = []
    for member in listing.servers:
        failing = known.balance.failing.get(member.address) or Failing()
        is_kept = bool(listing.trouble) or member.address in listing.kept
        found.append(KnownServer(member, max(0.0, failing.until - now), failing.why, is_kept))
    return found


_lock = threading.Lock()
_services: dict[str, Known] = {}


def known_of(service: str) -> Known:
    if service not in _services:
        require_app("outbox_app.fleet")
        register_as(CLIENT)
        with _lock:
            if service not in _services:
                _services[service] = Known(service)
    return _services[service]


def forget() -> None:
    """Forget all services, as in a process that has called none yet."""
    global _lock
    for known in _services.values():
        known.watch.stop.set()
    _lock = threading.Lock()
    _services.clear()


os.register_at_fork(after_in_child=forget)
