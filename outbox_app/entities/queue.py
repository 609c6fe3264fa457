"""The queue of a hot entity: the callers do the work, one batch after the other.

The first caller that finds an entity idle leads. It answers its own command, and all that have
gathered, in one transaction on its own connection. Then the caller that has waited longest leads.
A batch has gathered while the one before was committed: no command waits for a batch to fill.
Coroutines have no thread to lend: a small pool of daemon threads, which end when idle, leads.

The queue is memory only: after a process has died, its callers repeat their commands by their ids.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections
from django.utils.asyncio import async_unsafe

from ..database.transactions import leave_pool
from ..text import get_logger
from . import counting
from .conf import entity_settings
from .exceptions import InvalidCommand, Overloaded
from .forwarding import NotForwarded, forward, leader_of
from .request import Call, Command, Outcome, deadline_after, deliver
from .transaction import answer, in_callers_transaction, scope_of

logger = get_logger("outbox_app.entities")

#: Characters of arguments in a batch. A batch for another server has an eighth, to fit its door.
BATCH_SIZE = 4 * 1024 * 1024
#: The most commands that wait in one process, for all entities.
MAX_WAITING = 50_000
#: Seconds that an idle thread of the pool waits for a queue, and ``close`` for the batches.
IDLE = 10.0
ENDING = "This process is about to end."


class QueueKey(NamedTuple):
    """Identifies a queue: what its calls have in common."""

    entity: Any
    using: str
    id: str = ""
    scope: Hashable = None
    #: The other server that answers the calls, for any ids; empty if this process does.
    leader: str = ""


class EntityQueue:
    """The calls that wait for one entity, or for one other server, the oldest first."""

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.waiting: OrderedDict[Call, None] = OrderedDict()
        #: The call whose thread leads, or is to lead; None if a thread of the pool does.
        self.led_by: Call | None = None
        #: Whether the newest batch was a call that goes apart.
        self.was_apart = False

    def take(self) -> list[Call]:
        batch: list[Call] = []
        size, most = 0, BATCH_SIZE // 8 if self.key.leader else BATCH_SIZE
        while len(batch) < self.key.entity.batch_size and self.waiting:
            call, _ = self.waiting.popitem(last=False)  # the collector may remove others meanwhile
            size += len(call.text)
            if batch and (size > most or call.apart):
                self._put_first(call)
                break
            batch.append(call)
            # A signal may raise at any line of the main thread. It is no business of other callers.
            is_main = call.thread == threading.main_thread().ident
            if call.apart or (self.led_by is call and is_main):
                break
        self.was_apart = any(call.apart for call in batch)
        return batch

    def put_back(self, calls: Sequence[Call]) -> int:
        """Put calls back, except those whose caller is gone and cannot lead; return how many."""
        again = [call for call in calls if not call.gone]
        if self.was_apart:  # now a batch of all others
            for call in [each for each in self.waiting if each.apart]:
                self.waiting.move_to_end(call)
        for call in reversed(again):
            self._put_first(call)
        for call in again:
            if call.apart:  # all others go first
                self.waiting.move_to_end(call)
            if isinstance(call.waits, threading.Event):
                call.waits.clear()
        return len(again)

    def _put_first(self, call: Call) -> None:
        self.waiting[call] = None
        self.waiting.move_to_end(call, last=False)


class Queues:
    """The queues of this process. Each queue that exists has a leader, or is about to get one."""

    def __init__(self) -> None:
        self.by_key: dict[QueueKey, EntityQueue] = {}
        self.waiting = 0
        self.closed = False
        #: Queues that wait for a thread of the pool to lead them.
        self.to_lead: deque[EntityQueue] = deque()
        self.threads = self.idle = 0
        # Reentrant: the garbage collector may end a coroutine in a thread that has the lock.
        self.lock = threading.RLock()
        self.called, self.emptied = (threading.Condition(self.lock) for _ in range(2))
        self.of_thread = threading.local()

    def ask(self, call: Call, key: QueueKey) -> Outcome:
        """Wait for the answer to a call, or lead its queue."""
        call.waits = threading.Event()
        try:
            self.wait(self.enter(call, key), call)
        except BaseException:  # a signal (Celery's soft time limit) may raise at any line
            self.of_thread.is_leading = False
            if queue := self.by_key.get(key):
                self._leave(queue, call, ends=True)
            raise
        return call.result()

    def wait(self, queue: EntityQueue, call: Call) -> None:
        woken: Any = call.waits
        answered = False
        while not answered:
            if not woken.wait(max(call.seconds_left, 0)):
                waited = self._leave(queue, call)
                if not woken.is_set():
                    raise call.late(begun=not waited)
            answered = queue.led_by is not call or self.lead(queue, call)

    async def aask(self, call: Call, key: QueueKey) -> Outcome:
        loop = asyncio.get_running_loop()
        call.waits = future = loop.create_future()
        queue = self.enter(call, key)

        def expire() -> None:
            if not future.done():
                future.set_exception(call.late(begun=not self._leave(queue, call)))

        timer = loop.call_later(call.seconds_left, expire)
        try:
            await future
        except BaseException:
            self._leave(queue, call, ends=True)
            raise
        finally:
            timer.cancel()
        return call.result()

    def lead(self, queue: EntityQueue, own: Call | None = None) -> bool:
        """Answer one batch, and pass the lead on however it ends; say if ``own`` is answered."""
        left: Sequence[Call] = ()
        batch: list[Call] = []
        entity, using = queue.key.entity, queue.key.using
        self.of_thread.is_leading = True
        began = time.time_ns()
        try:
            with self.lock:
                batch = queue.take()
                self.waiting -= len(batch)
            if batch and queue.key.leader:
                forward(entity, batch, leader=queue.key.leader)
            elif batch:
                left = answer(entity, batch, using=using)
        except BaseException:
            # This thread has to end. Others repeat its calls: the ids find what was committed, and
            # an error may rest on versions that were not committed.
            redone = (Exception, Outcome, type(None))
            left = [c for c in batch if c is not own and isinstance(c.answer, redone)]
            for call in left:
                call.begun, call.alone, call.answer = True, True, None
            raise
        finally:
            self.of_thread.is_leading = False
            with self.lock:
                self.waiting += queue.put_back(left)
                self._pass_lead(queue)
            others = set(left)
            answered = [call for call in batch if call not in others]
            deliver(answered)
        if not queue.key.leader:
            counting.trace_batch(entity, answered, began)
        counting.write_if_due(using)
        return own not in others

    def waiting_on(self, using: str) -> int:
        with self.lock:
            return sum(
                len(queue.waiting) for key, queue in self.by_key.items() if key.using == using
            )

    def is_leading(self) -> bool:
        """Return whether this thread leads: it must not wait for calls that wait for it."""
        return getattr(self.of_thread, "is_leading", False)

    def close(self) -> None:
        """Refuse waiting and new calls, and let the batches under way end."""
        with self.lock:
            self.closed = True
            for queue in self.by_key.values():
                self._refuse(queue, ENDING)
            self.called.notify_all()
            self.emptied.wait_for(lambda: not self.by_key, timeout=IDLE)

    def enter(self, call: Call, key: QueueKey) -> EntityQueue:
        """Add a call to its queue. Raises ``Overloaded``."""
        with self.lock:
            queue = self.by_key.get(key) or EntityQueue(key)
            ahead = len(queue.waiting)
            if self.closed:
                raise _overloaded(call, ENDING)
            if ahead >= entity_settings().ENTITY_QUEUE or self.waiting >= MAX_WAITING:
                name = f"{key.entity.__name__} {call.id!r}"
                waiting = f"{ahead} commands wait for {name} in this process"
                raise _overloaded(call, f"{waiting}, and {self.waiting} for all entities.")
            queue.waiting[call] = None
            self.waiting += 1
            if key not in self.by_key:
                queue.led_by, self.by_key[key] = call, queue
                self._pass_lead(queue)
        return queue

    def _leave(self, queue: EntityQueue, call: Call, *, ends: bool = False) -> bool:
        """Remove a waiting call, and pass on the lead if its caller ends; say if it waited."""
        with self.lock:
            call.gone, is_leader = ends, queue.led_by is call
            waited = call in queue.waiting and is_leader <= ends
            if waited:
                del queue.waiting[call]
                self.waiting -= 1
            if is_leader and ends:
                self._pass_lead(queue)
            return waited

    def _pass_lead(self, queue: EntityQueue) -> None:
        """Let the oldest call lead. The caller holds the lock."""
        first = next(iter(queue.waiting), None)
        if first is None:
            del self.by_key[queue.key]
            if not self.by_key:  # a signal may have interrupted a count
                self.waiting = 0
            self.emptied.notify_all()
        elif first.may_lead and isinstance(first.waits, threading.Event):
            queue.led_by = first
            first.waits.set()
        else:
            queue.led_by = None
            self.to_lead.append(queue)
            self.called.notify()
            self._start()

    def _start(self) -> None:
        if len(self.to_lead) <= self.idle or self.threads >= entity_settings().ENTITY_THREADS:
            return
        try:
            threading.Thread(target=self._work, name="outbox-entities", daemon=True).start()
            self.threads += 1
        except RuntimeError as error:  # the system has no more threads
            if not self.threads:
                queue = self.to_lead.pop()
                self._refuse(queue, f"No thread can be started for coroutines: {error}.")
                self._pass_lead(queue)

    def _refuse(self, queue: EntityQueue, why: str) -> None:
        """Refuse the waiting calls, except the one that is to lead. The caller holds the lock."""
        calls = [call for call in queue.waiting if call is not queue.led_by]
        for call in calls:
            del queue.waiting[call]
            call.answer = _overloaded(call, why)
        self.waiting -= len(calls)
        deliver(calls)

    def _work(self) -> None:
        """Lead queues for coroutines, until this thread is idle for too long."""
        while True:
            with self.lock:
                self.idle += 1
                self.called.wait_for(lambda: self.to_lead or self.closed, timeout=IDLE)
                self.idle -= 1
                if not self.to_lead:
                    self.threads -= 1
                    break
                queue = self.to_lead.popleft()
                # A thread that waits for a server does not count: that server may wait for us.
                away = bool(queue.key.leader)
                self.threads -= away
                self._start()
            try:
                leave_pool(connections[queue.key.using])
                self.lead(queue)
            except BaseException:
                logger.exception("Batch was aborted entity=%s", queue.key.entity.__name__)
            with self.lock:
                if away and self.threads >= entity_settings().ENTITY_THREADS:
                    break
                self.threads += away
        connections.close_all()


def _overloaded(call: Call, why: str) -> Exception:
    return call.error_for_caller(Overloaded(f"{why} Nothing was written: send it again later."))


queues = Queues()
#: Set by tests: a test's transaction belongs to one thread, and coroutines use that thread.
in_one_thread = False


def _forget() -> None:
    """Start empty in a forked child: it has neither its parent's threads nor their callers."""
    global queues
    queues = Queues()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: queues.close())


@async_unsafe("execute() would block the event loop: in a coroutine, await aexecute() instead.")
def ask(entity: Any, asked: Command, *, timeout: float | None, using: str) -> Outcome:
    """Answer a command. As ``aask`` does, choose who answers: this process, or the leader."""
    call = Call(asked, deadline_after(timeout, entity.timeout))
    if belongs_here(entity, using):
        answer(entity, [call], using=using)
        counting.write_if_due(using)
        return call.result()
    if getattr(connections[using], "pool", None):  # connect now, as waiters may use up the pool
        connections[using].ensure_connection()
    scope = scope_of(using)
    if entity.routed and scope is None and (leader := leader_of(call, entity, using=using)):
        with suppress(NotForwarded):
            return queues.ask(call, QueueKey(entity, using, leader=leader))
    return queues.ask(call, QueueKey(entity, using, call.id, scope))


async def aask(entity: Any, asked: Command, *, timeout: float | None, using: str) -> Outcome:
    here = in_one_thread or scope_of(using) is not None or entity.batch_size == 1
    if not here and getattr(AsyncToSync.executors, "current", None):  # below async_to_sync()
        here = await sync_to_async(belongs_here)(entity, using)
    if here:
        # The session belongs to the thread in which Django runs synchronous code.
        return await sync_to_async(ask)(entity, asked, timeout=timeout, using=using)
    call = Call(asked, deadline_after(timeout, entity.timeout))
    if entity.routed and (leader := leader_of(call, entity, using=using)):
        with suppress(NotForwarded):
            return await queues.aask(call, QueueKey(entity, using, leader=leader))
    return await queues.aask(call, QueueKey(entity, using, call.id))


def belongs_here(entity: Any, using: str) -> bool:
    """Return whether this thread answers at once: in a transaction, alone, or while it leads."""
    alone = in_callers_transaction(entity, using=using) or entity.batch_size == 1
    return alone or queues.is_leading()


@async_unsafe("execute_many() would block the event loop: in a coroutine, use sync_to_async.")
def ask_many(
    entity: Any, commands: Iterable[Command], *, timeout: float | None, using: str
) -> list[Any]:
    """Answer commands entity by entity; return outcomes and errors."""
    calls: list[Call | InvalidCommand] = []
    for each in commands:
        try:
            calls.append(Call(each))
        except InvalidCommand as error:
            calls.append(error)
    answer_many(entity, (c for c in calls if isinstance(c, Call)), using=using, timeout=timeout)
    return [each.answer if isinstance(each, Call) else each for each in calls]


def answer_many(
    entity: Any, calls: Iterable[Call], *, using: str, timeout: Any = None, until: float = 0
) -> None:
    """Answer calls in this thread, ``until`` this time, or each transaction within its timeout."""
    inside, by_id = in_callers_transaction(entity, using=using), dict[str, EntityQueue]()
    for call in calls:
        own = EntityQueue(QueueKey(entity, using, call.id))
        by_id.setdefault(call.id, own).waiting[call] = None
    for _, queue in sorted(by_id.items()):
        while queue.waiting:
            batch, began = queue.take(), time.time_ns()
            deadline = until or deadline_after(timeout, entity.timeout)
            for call in batch:
                call.deadline = deadline
            queue.put_back(left := answer(entity, batch, using=using))
            if not inside:
                counting.trace_batch(entity, [*set(batch).difference(left)], began)
    counting.write_if_due(using)
