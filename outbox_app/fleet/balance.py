"""Which server takes the next call: servers are chosen by weight, failing ones are ejected.

Three failures in a row eject a server for the callers of this process: for 5 s, then twice as long
each time, up to a minute; then one call tries it. No more than half of a list is ejected: a process
whose own network is broken must not conclude that every server is down. An ejected server is tried
when all others have failed. The failures of a server that is no longer listed are forgotten.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from .registry import Member

#: Failures in a row that eject a server, and seconds of the first and of the longest ejection.
FAILURES, FIRST, LONGEST = 3, 5.0, 60.0


@dataclass(slots=True)
class Failing:
    """A server whose last call from this process has failed."""

    why: str = ""
    failures: int = 0
    #: Seconds of its last ejection, and when that ends; 0 if it was never ejected.
    seconds: float = 0.0
    until: float = 0.0
    #: Whether one call is trying it after an ejection.
    trying: bool = False


class Balance:
    """Chooses servers of one service for the callers of this process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.failing: dict[str, Failing] = {}
        # Start at random: a hundred clients that start together must not call the same server.
        self._turn = random.randrange(2**16)
        self._lock = threading.Lock()

    def attempts(self, servers: Sequence[Member], balance: str) -> Iterator[tuple[Member, bool]]:
        """Yield each server once, in the order in which to try them, and whether it is the last."""
        every = [each for each in servers if each.weight and not each.draining]
        left = list(every)
        while left:
            with self._lock:
                for gone in self.failing.keys() - {each.address for each in servers}:
                    del self.failing[gone]
                out = self.ejected(every)
                usable = [each for each in left if each.address not in out] or left
                chosen = self._choose(usable, balance)
                trial = self.failing.get(chosen.address)
                if trial is not None and trial.until:
                    # Other calls do not choose this server until the trial has ended.
                    trial.trying, trial.until = True, self.clock() + trial.seconds
            left.remove(chosen)
            yield chosen, not left

    def ejected(self, servers: Collection[Member]) -> list[str]:
        """Return the ejected addresses: at most half, those that have failed for longest."""
        now = self.clock()
        listed = {each.address for each in servers}
        out = [a for a, f in self.failing.items() if a in listed and now < f.until]
        return out[: len(listed) // 2]

    def succeeded(self, address: str) -> None:
        with self._lock:
            self.failing.pop(address, None)

    def failed(self, address: str, why: str) -> None:
        now = self.clock()
        with self._lock:
            state = self.failing.setdefault(address, Failing())
            state.failures += 1
            state.why = why
            # Calls that were in progress at the ejection fail, too, and must not prolong it.
            if state.failures >= FAILURES and (state.trying or now >= state.until):
                state.seconds = min(2 * state.seconds, LONGEST) or FIRST
                state.until, state.trying = now + state.seconds, False

    def _choose(self, usable: Sequence[Member], balance: str) -> Member:
        if balance == "round_robin":
            self._turn += 1
            return usable[self._turn % len(usable)]
        weights = [each.weight if balance == "weighted_random" else 1 for each in usable]
        return random.choices(usable, weights)[0]
