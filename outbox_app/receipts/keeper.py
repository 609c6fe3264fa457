"""The keeper of a worker process: one thread that renews the leases of all of its runs.

It also repeats the ends that the database refused, until the process ends: the job was executed,
and would be executed again if its row stayed. A forked child has a keeper of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from ..conf import BEATS, outbox_settings
from ..text import get_logger
from .ledger import Address, Ledger

logger = get_logger("outbox_app.receipts")


class Keeper:
    """The runs of one process on one alias."""

    def __init__(self, alias: str) -> None:
        self.ledger = Ledger(alias)
        #: One of its own: a lease does not wait for a statement that waits.
        self._renewals = Ledger(alias)
        self.lease_seconds = outbox_settings().RECEIPT_LEASE_SECONDS
        #: The tokens of the runs to renew, by the address of their jobs.
        self._runs: dict[str, Address] = {}
        #: Statements that failed, and are repeated.
        self._left: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = threading.Event()

    @property
    def beat_seconds(self) -> float:
        return self.lease_seconds / BEATS

    def keep(self, job: Address, token: str) -> None:
        """Renew the lease of a run from now on."""
        self._runs[token] = job
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._renew_all, name="outbox-receipts", daemon=True
                    )
                    self._thread.start()

    def forget(self, token: str) -> None:
        self._runs.pop(token, None)

    def do(self, what: str, statement: Callable[[], None]) -> None:
        """Execute an end; if the database fails, log that, and repeat it until it succeeds."""
        try:
            statement()
        except Exception as error:
            logger.warning("Receipt not written yet, to be repeated job=%s error=%s", what, error)
            self._left.append(statement)

    def stop(self) -> None:
        """Try once more what was refused; for the end of the process."""
        self._stopped.set()
        self._repeat()
        self.ledger.close()
        self._renewals.close()

    def _renew_all(self) -> None:
        while not self._stopped.wait(self.beat_seconds):
            try:
                if runs := [(job.id, token) for token, job in [*self._runs.items()]]:
                    self._renewals.renew(runs, seconds=self.lease_seconds)
            except Exception as error:
                logger.warning("Leases of runs not renewed runs=%d error=%s", len(runs), error)
            else:
                self._repeat()

    def _repeat(self) -> None:
        left, self._left = self._left, []
        for n, statement in enumerate(left):
            try:
                statement()
            except Exception:  # the first failure was logged
                self._left += left[n:]
                return


_keepers: dict[tuple[int, str], Keeper] = {}


def keeper_of(alias: str) -> Keeper:
    """Return this process's keeper. A forked child does not touch its parent's connection."""
    key = os.getpid(), alias
    return _keepers.get(key) or _keepers.setdefault(key, Keeper(alias))


def stop_keepers(**kwargs: Any) -> None:
    for (pid, _), keeper in list(_keepers.items()):
        if pid == os.getpid():
            keeper.stop()
