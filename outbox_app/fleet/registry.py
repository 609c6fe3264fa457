"""The contract of registries, where processes register and are found, and of their threads.

Each object is used by one thread. Any method may raise any error: then the thread tries again.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from django.db import connections
from django.utils.module_loading import import_string

from .. import __version__
from ..conf import BEATS, outbox_settings
from ..exceptions import InvalidArgument
from ..process.backoff import Backoff
from ..process.waiting import PollWaiter, StopFlag
from ..text import get_logger
from .conf import fleet_settings

logger = get_logger("outbox_app.fleet")
SERVER, CLIENT = "server", "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a service. The fields are those of the model ``Server``."""

    id: UUID = field(default_factory=uuid4)
    service: str
    kind: str = SERVER
    address: str = ""
    weight: int = 100
    node: str = field(default_factory=lambda: f"{socket.gethostname()[:240]}:{os.getpid()}")
    version: str = __version__
    draining: bool = False
    lease_seconds: float = 10.0


class Registry(ABC):
    """Where processes register and are found."""

    @abstractmethod
    def register(self, member: Member) -> None:
        """Enter a process. The entry is valid until no heartbeat has come for its lease."""

    @abstractmethod
    def beat(self, member: Member) -> Member | None:
        """Send a heartbeat; return the entry of the process as it is now, or None without one."""

    @abstractmethod
    def leave(self, member: Member) -> None:
        """Remove the entry of a process."""

    @abstractmethod
    def members(self, service: str) -> list[Member]:
        """Return the servers and clients of a service whose lease has not run out."""

    def change(self, name: str, *, weight: int | None = None, draining: bool) -> int:
        """Change the processes with this node, address or id; return how many there were."""
        raise InvalidArgument(
            f"Servers in a {type(self).__name__} cannot be changed from here. Change WEIGHT in "
            "their own settings."
        )

    @contextmanager
    def session(self, stop: StopFlag) -> Iterator[PollWaiter]:
        """Use the registry in this thread. Yields a waiter that its changes wake."""
        yield PollWaiter(stop)


def new_registry() -> Registry:
    return import_string(fleet_settings().REGISTRY)()  # type: ignore[no-any-return]


class RegistryThread:
    """A daemon thread that calls ``step`` with a registry until stopped, through all errors."""

    is_woken = False  # whether changes of the registry end its pauses

    def __init__(self, name: str) -> None:
        self.stop = StopFlag()
        self.backoff = Backoff("the registry", logger)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def step(self, registry: Registry) -> None:
        """Do the work that is due five times in a lease."""
        raise NotImplementedError

    def end(self, registry: Registry) -> None:
        """Called when the thread is stopped."""

    def failed(self, error: BaseException) -> None:
        self.backoff.failed(error)
        connections.close_all()  # closes those of this thread only

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                registry = new_registry()
                with registry.session(self.stop) as waiter:
                    while not self.stop.is_set():
                        self._attempt(registry)
                        (waiter if self.is_woken else self.stop).wait(self.pause())
                    self.end(registry)
            except BaseException as error:  # no session, as its thread cannot start, say
                self.failed(error)
                self.stop.wait(self.pause())

    def _attempt(self, registry: Registry) -> None:
        try:
            self.step(registry)
            self.backoff.succeeded()
        except BaseException as error:  # a registry's own, which must not end this thread
            self.failed(error)

    def pause(self) -> float:
        """Return the seconds until the next step, with jitter."""
        return outbox_settings().LEASE_SECONDS / BEATS * random.uniform(0.75, 1)
