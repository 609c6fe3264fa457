"""The contract of registries: who is there, as each process says of itself; and who uses them.

A registry is a hint. A list that is wrong makes calls slower, and only that. An object is used by
one thread. Each method may raise any error while the registry is away; the thread tries again.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from django.db import connections
from django.utils.module_loading import import_string

from .. import __version__
from ..conf import BEATS, fleet_settings, outbox_settings
from ..exceptions import InvalidArgument
from ..process.backoff import Backoff
from ..process.waiting import PollWaiter, StopFlag
from ..text import get_logger

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
        """Enter a process, which is there until it has been silent for its lease."""

    @abstractmethod
    def beat(self, member: Member) -> bool:
        """Say that a process lives. False: it is not there (any more), and has to register."""

    def current(self, member: Member) -> Member:
        """Return a process as it is there now, where it can be changed from outside."""
        return member

    @abstractmethod
    def leave(self, member: Member) -> None:
        """Take a process off."""

    @abstractmethod
    def members(self, service: str) -> list[Member]:
        """Return who is there now, servers and clients, without those that are silent."""

    def change(self, name: str, *, weight: int | None = None, draining: bool) -> int:
        """Change processes by their node, address or id; return how many there were."""
        raise InvalidArgument(
            f"Servers in a {type(self).__name__} cannot be changed from here. Change WEIGHT in "
            "their own settings."
        )

    @contextmanager
    def session(self, stop: StopFlag) -> Iterator[PollWaiter]:
        """Use the registry in this thread; yields what waits for its next change."""
        yield PollWaiter(stop)


def new_registry() -> Registry:
    registry: Registry = import_string(fleet_settings().REGISTRY)()
    return registry


class RegistryThread:
    """A daemon thread that uses a registry, step by step, through its errors, until stopped."""

    def __init__(self, name: str, registry: Callable[[], Registry] = new_registry) -> None:
        self.stop = StopFlag()
        self.registry = registry
        self.backoff = Backoff("the registry", logger)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def step(self, registry: Registry) -> None:
        """Do what is to be done five times in a lease."""
        raise NotImplementedError

    def wait(self, waiter: PollWaiter) -> None:
        """Wait for the next step; ``waiter`` is woken by changes."""
        self.stop.wait(pause())

    def end(self, registry: Registry) -> None:
        """Called when it is stopped."""

    def failed(self, error: Exception) -> None:
        self.backoff.failed(error)
        connections.close_all()  # of this thread

    def _run(self) -> None:
        while not self.stop.is_set():
            try:
                registry = self.registry()
                with registry.session(self.stop) as waiter:
                    while not self.stop.is_set():
                        self._attempt(registry)
                        self.wait(waiter)
                    self.end(registry)
            except Exception as error:  # no session: a thread of its own cannot be started
                self.failed(error)
                self.stop.wait(pause())

    def _attempt(self, registry: Registry) -> None:
        try:
            self.step(registry)
        except Exception as error:  # each registry has errors of its own
            self.failed(error)
        else:
            self.backoff.succeeded()


def pause() -> float:
    """Return the seconds between two looks at a registry, with jitter."""
    return outbox_settings().LEASE_SECONDS / BEATS * random.uniform(0.75, 1)
