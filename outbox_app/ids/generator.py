"""Unique 64-bit ids without asking the database; they grow with time.

``0 | 43 bits of milliseconds since 2025 | 3 datacentre | 5 node | 12 counter``. Time is reserved in
the table ``outbox_node``, not read from a clock: the milliseconds in which a process makes ids
belong to it for ever, and the next owner of its node begins above them. A reservation is committed
on a connection of its own: a rollback of the caller would free the time again. On SQLite, which
allows one writer, it is part of the caller's transaction, and other transactions use its time only
after the commit. While the database is unavailable, ids are made until the time is used up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from math import inf
from random import Random, SystemRandom
from threading import Lock, Thread
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import django.db
from django.core.exceptions import ImproperlyConfigured
from django.core.validators import MinValueValidator
from django.db import connections, models

from ..aliases import chosen, outbox_alias
from ..database.clock import Milliseconds
from ..database.transactions import (
    after_commit,
    is_in_test,
    lacks_autocommit,
    own_connection,
    require_table,
)
from ..exceptions import InvalidArgument
from ..process.background import at_end
from ..process.foreground import set_timeouts
from ..process.lease import elapsed
from .conf import DATACENTRES, NODES, id_settings
from .exceptions import NoNode
from .models import Node

__all__ = ["IdParts", "SnowflakeField", "parts_of", "shard_of", "snowflake", "snowflakes"]

EPOCH = datetime(2025, 1, 1, tzinfo=UTC)
#: Milliseconds: reserved at once; left when more are requested; until the node of a killed process
#: is free; and the most that fit into an id.
RESERVED, EARLY, SILENT, MOST = 10_000, 3_000, 60_000, 2**43 - 1
#: Ids in a millisecond. The first counter of each is random, from 0 to SHARDS - 1, so that tables
#: that are chosen by the least significant bits fill evenly, even with one id in a millisecond.
COUNTERS, SHARDS = 2**12, 128
#: Seconds for which a caller waits for the database, and after which another thread asks it.
WAIT, HUNG = 5.0, 10.0


class IdParts(NamedTuple):
    """The parts of an id."""

    time: datetime
    datacentre: int
    node: int
    counter: int


def snowflake() -> int:
    """Return a new id.

    Raises:
        NoNode: Every node is taken, or no reserved time is left and the database is unavailable.
    """
    return _ids.make()


def snowflakes(n: int) -> list[int]:
    """Return ``n`` new ids, in ascending order. Beyond 3,968 they use the next millisecond."""
    if type(n) is not int or n < 0:
        raise InvalidArgument(f"The n of snowflakes() must be a whole number from 0; got {n!r}.")
    return _ids.make_many(n)


def parts_of(id: int) -> IdParts:
    """Split an id into its parts. Any number of 63 bits has them, also if no process made it."""
    _require_id(id)
    time = EPOCH + timedelta(milliseconds=id >> 20)
    return IdParts(time, id >> 17 & DATACENTRES - 1, id >> 12 & NODES - 1, id & COUNTERS - 1)


def shard_of(id: int, shards: int = SHARDS) -> int:
    """Return the shard of an id, by the same formula as ``PARTITION BY HASH`` of MySQL.

    Args:
        shards: The number of shards, 1 to 128. Ids do not fill more shards evenly.
    """
    _require_id(id)
    if type(shards) is not int or not 1 <= shards <= SHARDS:
        raise InvalidArgument(f"shards must be 1 to {SHARDS}, which fill evenly; got {shards!r}.")
    return id % shards


def _require_id(id: object) -> None:
    if type(id) is not int or not 0 <= id < 2**63:
        raise InvalidArgument(f"An id must be a whole number from 0 to 2**63 - 1; got {id!r}.")


class SnowflakeField(models.BigIntegerField):  # type: ignore[type-arg]
    """A column whose default is a new id, made with the instance. Forms leave it out."""

    default_validators: ClassVar = [MinValueValidator(0)]  # type: ignore[misc]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"default": snowflake, "editable": False, **options})

    def deconstruct(self) -> Any:
        name, _path, args, options = super().deconstruct()
        if options.get("default") is snowflake:
            del options["default"]
        if options.pop("editable", True):
            options["editable"] = True
        return name, "outbox_app.ids.SnowflakeField", args, options  # its public name


@dataclass(slots=True, eq=False)
class _Reserved:
    """Reserved time of one node: the milliseconds after ``low``, up to and including ``high``."""

    using: str
    pair: tuple[int, int]
    low: int
    high: int
    #: The reading of the monotonic clock at millisecond 0.
    zero: float
    #: The millisecond from which on more time is requested.
    renew_at: float = inf
    #: When the current millisecond ends on that clock, and the ids that are left in it.
    current: tuple[float, Iterator[int]] = (-inf, iter(()))


class Snowflakes:
    """Makes the ids of one process. Its threads share it, and take its lock once a millisecond."""

    def __init__(self, *, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._draw = Random().getrandbits
        #: The last millisecond in which ids were made, with any node: no later id is below it.
        self._last = -1
        self.begin()

    def begin(self) -> None:
        """Start without a reservation: after a fork, it belongs to the parent."""
        self._lock, self._turn = Lock(), Lock()
        self.owner = uuid4()
        self._reserved: _Reserved | None = None
        self._asked: tuple[Future[None], float] | None = None

    def make(self) -> int:
        used = None
        # A thread may be suspended anywhere here: ``next`` is atomic, and ids stay this process's.
        while (id := next(ids := self._ids(used), None)) is None:
            used = ids
        return id

    def make_many(self, n: int) -> list[int]:
        made: list[int] = []
        used = None
        while len(made) < n:
            made += islice(used := self._ids(used), n - len(made))
        return made

    def _ids(self, used: Iterator[int] | None) -> Iterator[int]:
        """Return the ids left in this millisecond, or those of the next if ``used`` is used up."""
        reserved = self._reserved
        if reserved is not None:
            until, ids = reserved.current
            if ids is not used and self._clock() < until:
                return ids
        while reserved is None or (found := self._advance(reserved, used)) is None:
            reserved = self._reserve(reserved)
        return found

    def _advance(self, reserved: _Reserved, used: Iterator[int] | None) -> Iterator[int] | None:
        with self._lock:
            until, ids = reserved.current
            now = self._clock()
            if ids is not used and now < until:  # another thread was faster
                return ids
            ms = max(int((now - reserved.zero) * 1000), reserved.low + 1, self._last + 1)
            if ms > reserved.high:
                return None
            datacentre, node = reserved.pair
            first = ms << 20 | datacentre << 17 | node << 12
            self._last, ids = ms, iter(range(first + self._draw(7), first + COUNTERS))
            reserved.current = reserved.zero + (ms + 1) / 1000, ids
            if ms > reserved.renew_at:
                reserved.renew_at = ms + RESERVED / 20
                with suppress(NoNode):  # some reserved time is left
                    self._ask(reserved.using)
            return ids

    def _reserve(self, before: _Reserved | None) -> _Reserved | None:
        """Wait for a new reservation, and return it; None if it was given back meanwhile."""
        with chosen(""):  # not the alias of an admin page: processes there may make the same ids
            using = outbox_alias()
        try:
            if _is_one_writer(using):
                if connections[using].in_atomic_block and not is_in_test(using):
                    return self._reserve_inside(using)
                with self._turn:
                    if self._reserved is before:
                        self._keep(self._request(using))
                return self._reserved
            with self._lock:
                if self._reserved is not before:
                    return self._reserved
                future, since = self._ask(using)
            future.result(timeout=max(0.0, since + WAIT - self._clock()))
            return self._reserved
        except (django.db.Error, TimeoutError) as error:
            reason = str(error) or f"no answer in {WAIT:g} s"
            text = f"No reserved time is left for ids, and {using!r} reserves none: {reason}"
            raise NoNode(text) from error

    def _ask(self, using: str) -> tuple[Future[None], float]:
        """Let another thread reserve time, unless one does. Raises ``NoNode`` if none can start."""
        if self._asked and not self._asked[0].done() and self._asked[1] + HUNG > self._clock():
            return self._asked
        asked = Future[None](), self._clock()
        thread = Thread(target=self._answer, args=(using, asked[0]), name="outbox-ids", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads, or the interpreter exits
            raise NoNode(f"No reserved time is left for ids; no thread starts: {error}") from error
        self._asked = asked
        return asked

    def _answer(self, using: str, future: Future[None]) -> None:
        try:
            with own_connection(using, seconds=WAIT):
                reserved = self._request(using)
            reserved.renew_at = reserved.high - EARLY
            self._keep(reserved)
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    def _reserve_inside(self, using: str) -> _Reserved:
        """Reserve time inside the caller's transaction, for that alone until the commit."""
        # Callbacks that are still here belong to this transaction, and no rollback dropped them.
        callbacks = [f for _, f, *_ in connections[using].run_on_commit if isinstance(f, partial)]
        own: list[_Reserved] = [f.args[0] for f in callbacks if f.func == self._keep]
        if own and max((self._clock() - own[-1].zero) * 1000, self._last + 1) < own[-1].high:
            return own[-1]
        reserved = self._request(using)
        after_commit(partial(self._keep, reserved), using=using)
        return reserved

    def _keep(self, reserved: _Reserved) -> None:
        with self._lock:
            before = self._reserved
            if before and before.using == reserved.using and before.high >= reserved.high:
                return  # the late answer to a thread that hung
            if before and before.pair == reserved.pair and before.high == reserved.low:
                reserved.low = before.low
            self._reserved = reserved

    def _request(self, using: str) -> _Reserved:
        """Reserve time of the node that this process owns, or else of a free one."""
        require_table(Node, using=using)
        wanted = id_settings().DATACENTRE
        if wanted not in (None, *range(DATACENTRES)):
            raise ImproperlyConfigured(f"OUTBOX['DATACENTRE'] is {wanted!r}, not 0 to 7.")
        of = range(DATACENTRES) if wanted is None else [wanted]
        pairs = {(each, node) for each in of for node in range(NODES)}
        nodes = Node.objects.using(using).filter(datacentre__in=of, node__lt=NODES)
        columns = nodes.values_list("datacentre", "node", "owner", "reserved_ms", Milliseconds())
        while True:
            rows = {(d, n): row for d, n, *row in columns.all()}
            answered = self._clock()
            if missing := pairs - rows.keys():
                # Begin above the time that owners of deleted rows may still use.
                reserved_ms: Any = Milliseconds() + RESERVED + EARLY
                new = [Node(datacentre=d, node=n, reserved_ms=reserved_ms) for d, n in missing]
                nodes.bulk_create(new, ignore_conflicts=True)
                continue
            own = [pair for pair, (owner, *_) in rows.items() if owner == self.owner]
            free = own or [
                pair
                for pair, (owner, reserved_ms, now) in rows.items()
                if (owner is None or reserved_ms < now - SILENT) and reserved_ms < MOST - RESERVED
            ]
            if not free:
                raise NoNode(_all_taken(wanted, len(pairs), using))
            pair = SystemRandom().choice(free)
            _, seen, now = rows[pair]
            low = max(seen, now, self._last)
            # Of two processes that have read the same row, only one updates it, and owns the time.
            row = nodes.filter(datacentre=pair[0], node=pair[1], reserved_ms=seen)
            if row.update(owner=self.owner, reserved_ms=low + RESERVED):
                return _Reserved(using, pair, low, low + RESERVED, answered - now / 1000)

    def give_back(self) -> None:
        """Give the node and the time after the last id to others, unless the time has run out."""
        with self._lock:
            reserved, self._reserved = self._reserved, None
            if reserved is None or (self._clock() - reserved.zero) * 1000 > reserved.high:
                return
            end, reserved.high = reserved.high, max(reserved.low, self._last)
        with suppress(Exception), own_connection(reserved.using, seconds=0.1):
            set_timeouts(reserved.using)  # on this connection only: the process has to end
            own = Node.objects.using(reserved.using).filter(owner=self.owner, reserved_ms=end)
            own.update(owner=None, reserved_ms=reserved.high)


def _is_one_writer(using: str) -> bool:
    """Return whether this is SQLite, where a second connection would wait for the caller's."""
    connection = connections[using]
    if connection.vendor != "sqlite" or lacks_autocommit(connection):
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False  # a coroutine has no transaction, and Django refuses its queries


def _all_taken(wanted: int | None, count: int, using: str) -> str:
    of = "" if wanted is None else f" of datacentre {wanted}"
    cure = "let fewer processes make ids" if wanted is None else "set another OUTBOX['DATACENTRE']"
    return (
        f"All {count} nodes{of} are taken on {using!r}: each belongs to a process that makes ids, "
        f"or that was killed in the last minute. Wait until one is free, or {cure}."
    )


_ids = Snowflakes()
os.register_at_fork(after_in_child=_ids.begin)
at_end(_ids.give_back)
