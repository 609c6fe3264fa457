"""A stress for readers of a log.

``stress`` lets writers loose on a log while one reader reads it, with
pages of random sizes and crashes; what came is compared with what was committed. It begins with the
interleavings in which the usual cursors lose or invert rows, so a naive reader never passes.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from django.db import connections, transaction

from outbox_app.events import NewEvent, publish, publish_many
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Event, StreamHead
from tests.patience import patience

from .sessions import Session, execute, truncate


class Row(NamedTuple):
    """What a reader delivers."""

    id: int
    stream: str
    version: int
    data: Any


class Reader(Protocol):
    """What is put under stress. A state is text, stored between two pages."""

    def start(self) -> str: ...
    def read(self, state: str, limit: int) -> tuple[list[Row], str, bool]: ...
    def close(self) -> None: ...


class WindowReader:
    """The reader of the package."""

    def __init__(self, alias: str, **options: Any) -> None:
        self.reader = LogReader(Event, using=alias, **options)

    def start(self) -> str:
        return self.reader.window.start(None).dump()

    def read(self, state: str, limit: int) -> tuple[list[Row], str, bool]:
        events, page = self.reader.read(self.reader.load(state), limit)
        rows = [Row(e.id, e.stream, e.version, e.data) for e in events]
        return rows, page.state.dump(), page.more

    def close(self) -> None:
        self.reader.close()


class Listener:
    """Reads with one reader, crashes now and then, and keeps the books."""

    def __init__(self, reader: Reader, *, dice: random.Random, crashes: float = 0.2) -> None:
        self.reader = reader
        self.dice = dice
        self.crashes = crashes
        self.state = reader.start()
        self.rows: list[Row] = []
        self.latest: dict[str, int] = {}
        self.inverted = 0
        self.acausal = 0

    def page(self) -> bool:
        """Handle one page, or crash before its state is stored. Says whether anything came."""
        rows, state, more = self.reader.read(self.state, self.dice.choice([1, 2, 7, 30, 500]))
        if self.dice.random() < self.crashes:
            return True
        for row in rows:
            latest = self.latest.get(row.stream, 0)
            self.inverted += row.version < latest
            self.latest[row.stream] = max(latest, row.version)
            seen, version = row.data.get("saw") or ("", 0)
            self.acausal += self.latest.get(seen, 0) < version
        self.rows += rows
        self.state = state
        return bool(rows) or more

    def poll(self) -> None:
        """Read until nothing comes."""
        while self.page():
            pass

    def hears(self, stream: str, seconds: float = 1.0) -> None:
        """Poll until the stream came. A naive reader may not get there: the clock decides."""
        deadline = time.monotonic() + seconds
        while stream not in self.latest and time.monotonic() < deadline:
            self.poll()

    def verdict(self, alias: str) -> Verdict:
        self.poll()
        committed = set(Event.objects.using(alias).values_list("id", flat=True))
        ids = [row.id for row in self.rows]
        return Verdict(
            len(committed - set(ids)),
            len(set(ids) - committed),
            len(ids) - len(set(ids)),
            self.inverted,
            self.acausal,
            len(committed),
        )


class Verdict(NamedTuple):
    """How many rows were lost, not committed, delivered twice, in the wrong order, too early."""

    lost: int
    invented: int
    twice: int
    inverted: int
    acausal: int
    committed: int

    @property
    def exact(self) -> bool:
        return not any(self[:-1])

    @property
    def caught(self) -> bool:
        return self.lost > 0 or self.inverted > 0


def traps(alias: str, listener: Listener) -> None:
    """The interleavings that the usual cursors do not survive."""
    with Session(alias) as a, Session(alias) as b:
        # A position that commits late, while readers wait for longer than the impatient do.
        a.begin().publish("late-1")
        b.begin().publish("late-2")
        b.commit()
        listener.hears("late-2")
        patient = time.monotonic() + 0.15
        while time.monotonic() < patient:
            listener.poll()
        a.commit()
        listener.hears("late-1", 0.5)
        # Transaction ids in one order, positions in the other; the first commits first.
        a.begin().assign_xid()
        b.begin().assign_xid()
        b.publish("cross-1")
        a.publish("cross-2")
        a.commit()
        listener.hears("cross-2", 10.0)
        b.commit()
        listener.hears("cross-1", 0.5)
        # It wrote something before it waited for the stream: version 2 has the lower transaction.
        a.begin().assign_xid()
        b.begin().publish("order")
        b.commit()
        a.publish("order")
        a.commit()
        listener.hears("order")
        # A transaction of five seconds, and one of four that ends before it.
        a.begin().publish("old-1")
        a.age(5)
        b.begin().publish("old-2")
        b.age(4)
        b.commit()
        listener.hears("old-2")
        a.commit()
        listener.hears("old-1", 0.5)


class Writer(threading.Thread):
    """Does a number of transactions of every kind, at random."""

    def __init__(self, alias: str, number: int, *, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.alias = alias
        self.number = number
        self.count = count
        self.dice = random.Random(seed * 1000 + number)
        self.vendor = connections[alias].vendor
        self.done = 0
        self.all: list[Writer] = [self]
        self.error: BaseException | None = None

    def run(self) -> None:
        kinds = [self.plain, self.plain, self.savepoints, self.rolled_back, self.bulk]
        if self.vendor != "sqlite":  # there an open transaction holds up all others
            kinds += [self.long]
        if self.vendor == "postgresql":
            kinds += [self.prepared]
        try:
            for _ in range(self.count):
                self.dice.choice(kinds)()
                self.done += 1
        except BaseException as error:
            self.error = error
        finally:
            self.done = self.count
            connections[self.alias].close()

    def plain(self) -> None:
        with transaction.atomic(using=self.alias):
            self.write_first()
            self.publish(self.shared())

    def savepoints(self) -> None:
        with transaction.atomic(using=self.alias):
            self.write_first()
            for stream in sorted({self.shared() for _ in range(3)}):
                with transaction.atomic(using=self.alias):
                    self.publish(stream)
                    transaction.set_rollback(self.dice.random() < 0.4, using=self.alias)

    def rolled_back(self) -> None:
        with transaction.atomic(using=self.alias):
            self.publish(self.shared())
            transaction.set_rollback(True, using=self.alias)

    def bulk(self) -> None:
        size = self.dice.choice([2, 20, 150])
        with transaction.atomic(using=self.alias):
            streams = [self.shared() for _ in range(size)]
            publish_many((NewEvent(s, "bulk", {}) for s in streams), using=self.alias)
            transaction.set_rollback(self.dice.random() < 0.3, using=self.alias)

    def long(self) -> None:
        """Open until others have committed several times; no other session needs its stream."""
        with transaction.atomic(using=self.alias):
            self.publish(self.own())
            self.others_go_on()
            self.publish(self.own())

    def prepared(self) -> None:
        name = f"{connections[self.alias].settings_dict['NAME']}-{self.number}-{self.done}"
        with transaction.atomic(using=self.alias):
            self.publish(self.own())
            execute(self.alias, f"PREPARE TRANSACTION '{name}'")
        try:
            self.others_go_on()
        finally:
            end = self.dice.choice(["COMMIT", "ROLLBACK"])
            execute(self.alias, f"{end} PREPARED '{name}'")

    def others_go_on(self) -> None:
        others = [w for w in self.all if w is not self]
        goals = [(w, min(w.count, w.done + 2)) for w in others]
        deadline = time.monotonic() + 0.3  # two long ones wait for one another
        while any(w.done < goal for w, goal in goals) and time.monotonic() < deadline:
            time.sleep(0.002)

    def write_first(self) -> None:
        if self.vendor == "postgresql" and self.dice.random() < 0.5:
            execute(self.alias, "SELECT pg_current_xact_id()")

    def publish(self, stream: str) -> None:
        """Publish, and note a version of another stream that this transaction could see."""
        other = self.shared()
        heads = StreamHead.objects.using(self.alias).filter(log="outbox_event", stream=other)
        version = heads.values_list("version", flat=True).first()
        data = {"saw": [other, version]} if version and other != stream else {}
        publish(stream, "happened", data, using=self.alias)

    def shared(self) -> str:
        return f"shared-{self.dice.randrange(3)}"

    def own(self) -> str:
        return f"own-{self.number}"


def stress(alias: str, reader: Reader, *, writers: int = 5, count: int = 30, seed: int) -> Verdict:
    """Run the traps, then writers and the reader side by side. Returns the books."""
    truncate(alias)
    listener = Listener(reader, dice=random.Random(seed))
    threads: list[Writer] = []
    try:
        if connections[alias].vendor != "sqlite":
            traps(alias, listener)
        threads += [Writer(alias, n, count=count, seed=seed) for n in range(writers)]
        # InnoDB lets writers that wait for a new stream's head deadlock when its maker rolls back.
        for stream in sorted({thread.shared() for thread in threads for _ in range(20)}):
            with transaction.atomic(using=alias):
                publish(stream, "made", using=alias)
        for thread in threads:
            thread.all = threads
            thread.start()
        deadline = time.monotonic() + patience()
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < deadline, "the writers hang"
            listener.page()
        for thread in threads:
            assert thread.error is None, repr(thread.error)
        return listener.verdict(alias)
    finally:
        with ExitStack() as stack:
            for thread in threads:
                stack.callback(thread.join, patience())
        reader.close()
