"""Ids of 64 bits that no two processes make, and that grow with time.

``0 | 43 bits of milliseconds since 2025 | 3 datacentre | 5 node | 12 counter``. Time is reserved in
the table ``outbox_node``, not read from a clock: a process makes ids in milliseconds that are its
own for ever, and the next owner of its node begins above them. So a clock set back, a process that
was stopped, and a fork (the child has nothing reserved) make no id again. The reservation is
committed at once, on a connection of its own: the rollback of a caller would give the time out
again. On SQLite, which has one writer, it is part of the caller's transaction; other transactions
use its time only once that is committed.

While the database is away ids go on until the reserved time is used up; then ``NoNode`` is raised.
A process that ends gives its node back; one that is killed keeps it for a minute.
"""

from __future__ import annotations

import asyncio
import atexit
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
from celery.signals import worker_process_shutdown
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.core.validators import MinValueValidator
from django.db import connections, models
from django.dispatch import receiver

from .aliases import chosen, outbox_alias
from .conf import fleet_settings
from .exceptions import InvalidArgument, NoNode
from .models import Node
from .models.node import DATACENTRES, NODES, Milliseconds
from .process.lease import elapsed
from .transactions import after_commit, is_in_test, lacks_autocommit, own_connection, require_table

__all__ = ["IdParts", "SnowflakeField", "parts_of", "shard_of", "snowflake", "snowflakes"]

EPOCH = datetime(2025, 1, 1, tzinfo=UTC)
#: Milliseconds that are reserved at once; those left when more are asked for; after which the
#: node of a process that was killed is free; that an id has room for.
RESERVED, EARLY, SILENT, MOST = 10_000, 3_000, 60_000, 2**43 - 1
#: Ids in a millisecond. The first counter is drawn below SHARDS, so that tables that are chosen by
#: the least significant bits fill evenly, however few ids there are in a millisecond.
COUNTERS, SHARDS = 2**12, 128
#: Seconds for which an id waits for the database, and after which another thread asks it.
WAIT, HUNG = 5.0, 10.0


class IdParts(NamedTuple):
    """What an id is made of."""

    time: datetime
    datacentre: int
    node: int
    counter: int


def snowflake() -> int:
    """Return a new id.

    Raises:
        NoNode: Every node is taken, or no time is left and the database is away.
    """
    return _ids.make()


def snowflakes(n: int) -> list[int]:
    """Return so many new ids, in growing order. Beyond 3,968 they use the next millisecond."""
    if type(n) is not int or n < 0:
        raise InvalidArgument(f"snowflakes() makes a whole number of ids from 0; it got {n!r}.")
    return _ids.make_many(n)


def parts_of(id: int) -> IdParts:
    """Take an id apart. Any number of 63 bits is one: this says not that it was ever made."""
    _require_id(id)
    time = EPOCH + timedelta(milliseconds=id >> 20)
    return IdParts(time, id >> 17 & DATACENTRES - 1, id >> 12 & NODES - 1, id & COUNTERS - 1)


def shard_of(id: int, shards: int = SHARDS) -> int:
    """Return which of so many tables an id belongs to, as ``PARTITION BY HASH`` of MySQL does.

    Args:
        shards: 1 to 128. Ids do not fill more tables evenly.
    """
    _require_id(id)
    if type(shards) is not int or not 1 <= shards <= SHARDS:
        raise InvalidArgument(f"Ids fill 1 to {SHARDS} shards evenly; shards is {shards!r}.")
    return id % shards


def _require_id(id: object) -> None:
    if type(id) is not int or not 0 <= id < 2**63:
        raise InvalidArgument(f"An id is a whole number from 0 to 2**63 - 1; it is {id!r}.")


class SnowflakeField(models.BigIntegerField):  # type: ignore[type-arg]
    """A column whose default is a new id, made with the instance. Forms leave it out."""

    default_validators: ClassVar = [MinValueValidator(0)]  # type: ignore[misc]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"default": snowflake, "editable": False, **options})

    def deconstruct(self) -> Any:
        name, path, args, options = super().deconstruct()
        if options.get("default") is snowflake:
            del options["default"]
        if options.pop("editable", True):
            options["editable"] = True
        return name, path, args, options


@dataclass(slots=True, eq=False)
class _Reserved:
    """The milliseconds after ``low`` up to ``high`` of one node."""

    using: str
    pair: tuple[int, int]
    low: int
    high: int
    #: What the monotonic clock showed at millisecond 0.
    zero: float
    #: From this millisecond on more time is asked for.
    renew_at: float = inf
    #: When the millisecond in use ends on that clock, and its ids that are left.
    current: tuple[float, Iterator[int]] = (-inf, iter(()))


class Snowflakes:
    """The ids of one process. Threads share it, and take its lock once a millisecond."""

    def __init__(self, *, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._draw = Random().getrandbits
        #: The last millisecond that was used, with any node: no id goes back below it.
        self._last = -1
        self.begin()

    def begin(self) -> None:
        """Forget what is reserved: after a fork it is the parent's."""
        self._lock, self._turn = Lock(), Lock()
        self.owner = uuid4()
        self._reserved: _Reserved | None = None
        self._asked: tuple[Future[None], float] | None = None

    def make(self) -> int:
        used = None
        # A thread may stop anywhere here: ``next`` is one step, and the ids stay this process's.
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
        """Return ids of this millisecond, or of the next one if these are used up."""
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
                with suppress(NoNode):  # there are some left
                    self._ask(reserved.using)
            return ids

    def _reserve(self, before: _Reserved | None) -> _Reserved | None:
        """Wait for more time than before, and return it; None where it was given back meanwhile."""
        with chosen(""):  # not the alias of a page of the admin: its processes make the same ids
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
            text = f"No time is reserved for ids, and {using!r} reserves none: {reason}"
            raise NoNode(text) from error

    def _ask(self, using: str) -> tuple[Future[None], float]:
        """Let another thread ask, unless one does already. Raises ``NoNode`` if none can start."""
        if self._asked and not self._asked[0].done() and self._asked[1] + HUNG > self._clock():
            return self._asked
        asked = Future[None](), self._clock()
        thread = Thread(target=self._answer, args=(using, asked[0]), name="outbox-ids", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more, or the interpreter ends
            raise NoNode(f"No time is reserved for ids, and no thread asks: {error}") from error
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
        """Reserve inside the caller's transaction, for that one alone until it has committed."""
        # A callback that is there is of this transaction, and no savepoint has dropped it.
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
                return  # of a thread that hung
            if before and before.pair == reserved.pair and before.high == reserved.low:
                reserved.low = before.low
            self._reserved = reserved

    def _request(self, using: str) -> _Reserved:
        """Reserve time of a node: our own, if it still is, else a free one."""
        require_table(Node, "0011_nodes_of_ids", using=using)
        wanted = fleet_settings().DATACENTRE
        if wanted not in (None, *range(DATACENTRES)):
            raise ImproperlyConfigured(f"OUTBOX['FLEET']['DATACENTRE'] is {wanted!r}, not 0 to 7.")
        of = range(DATACENTRES) if wanted is None else [wanted]
        pairs = {(each, node) for each in of for node in range(NODES)}
        nodes = Node.objects.using(using).filter(datacentre__in=of, node__lt=NODES)
        columns = nodes.values_list("datacentre", "node", "owner", "reserved_ms", Milliseconds())
        while True:
            rows = {(d, n): row for d, n, *row in columns.all()}
            answered = self._clock()
            if missing := pairs - rows.keys():
                # Above what owners of deleted rows may still use.
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
            # Of two that have seen the same, one finds the row. Who finds it owns the time.
            row = nodes.filter(datacentre=pair[0], node=pair[1], reserved_ms=seen)
            if row.update(owner=self.owner, reserved_ms=low + RESERVED):
                return _Reserved(using, pair, low, low + RESERVED, answered - now / 1000)

    def give_back(self, **kwargs: Any) -> None:
        """Let others have the node, above the last id. A reservation that has ended stays."""
        with self._lock:
            reserved, self._reserved = self._reserved, None
            if reserved is None or (self._clock() - reserved.zero) * 1000 > reserved.high:
                return
            end, reserved.high = reserved.high, max(reserved.low, self._last)
        with suppress(Exception), own_connection(reserved.using, seconds=0.1):
            own = Node.objects.using(reserved.using).filter(owner=self.owner, reserved_ms=end)
            own.update(owner=None, reserved_ms=reserved.high)


def _is_one_writer(using: str) -> bool:
    """Say whether another connection would wait for the caller's own: on SQLite."""
    connection = connections[using]
    if connection.vendor != "sqlite" or lacks_autocommit(connection):
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False  # a coroutine has no transaction, and may not ask


def _all_taken(wanted: int | None, count: int, using: str) -> str:
    of = "" if wanted is None else f" of datacentre {wanted}"
    cure = "fewer processes" if wanted is None else "OUTBOX['FLEET']['DATACENTRE'] be another one"
    return (
        f"All {count} nodes{of} are taken on {using!r}: each belongs to a process that makes ids, "
        f"or was killed in the last minute. Wait for one to be free, or let {cure} make ids."
    )


_ids = Snowflakes()
os.register_at_fork(after_in_child=_ids.begin)
atexit.register(_ids.give_back)
worker_process_shutdown.connect(_ids.give_back, weak=False)


@receiver(setting_changed, dispatch_uid="outbox_app.ids")
def _move(*, setting: str, **kwargs: Any) -> None:
    """Leave a node whose table may be on another alias now: in tests only."""
    if setting == "OUTBOX":
        _ids.give_back()
