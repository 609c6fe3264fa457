"""The check-back: asks senders for the outcomes of events that they did not confirm or cancel.

One process at a time asks a sender, by a lease. To claim rows, a process moves their next check
ahead: if it dies, the next process asks. If two processes ask, both get the same answer. Only an
explicit answer counts. A sender that is unreachable, slow or broken is asked again later, and
delays only itself. If it gives no answer by ``decide_by``, the policy of the event decides, or a
person.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any
from uuid import UUID
from zlib import crc32

import django.db
from django.db import connections
from django.db.models import Case, F, When
from django.db.models.functions import Least

from ..database.clock import DatabaseNow, aware, stored
from ..database.encoding import replaced
from ..database.lock_wait import is_conflict
from ..failpoints import failpoint
from ..process.backoff import Backoff
from ..process.loop import LeasedLoop
from ..text import error_text, get_logger, storable
from . import keeper
from .exceptions import UnknownPrepared
from .fences import COMMITTED, IN_PROGRESS, ROLLED_BACK, TOO_OLD, Question, outcomes
from .local import PREFIX
from .models import PreparedEvent

logger = get_logger("outbox_app.prepared")

State, Policy = PreparedEvent.State, PreparedEvent.Policy
DECIDES = {COMMITTED: State.CONFIRMED, ROLLED_BACK: State.CANCELLED}
POLICIES: dict[str, str] = {Policy.CONFIRM: State.CONFIRMED, Policy.CANCEL: State.CANCELLED}
UNDECIDED = "The sender could not say in time what became of the transaction."

#: Processes share the senders by the CRC-32 of their names, modulo this number.
PARTS = 16
#: The most questions to one sender under way, and the most ids in each.
QUESTIONS, BATCH = 4, 100
#: The most questions that may hang, each with a thread and perhaps a connection to the sender.
HANGING = 20
#: Seconds that a claim keeps other processes away: longer than a question takes.
CLAIM_SECONDS = 30.0
#: The first and the longest pause before an event is asked about again. Each pause doubles.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
#: The most overdue rows that are decided at once.
EXPIRED = 500
INTERVAL = 1.0
ANSWER_SECONDS = 300.0
#: Seconds that a stopping process waits for the questions under way.
LEAVE_SECONDS = 5.0


def ask(sender: str, questions: Sequence[Question]) -> dict[UUID, str]:
    """Return the answers of a sender; raise any error if it cannot be asked."""
    if not sender.startswith(PREFIX):
        from .remote import ask_over_http  # needs the extra door

        return ask_over_http(sender, questions)
    alias = sender.removeprefix(PREFIX)
    if alias not in connections:
        raise UnknownPrepared(f"There is no sender {sender!r} to ask: no such alias.")
    # In the form of timezone.now(), with which check_back functions compare it.
    local = [each._replace(prepared_at=stored(each.prepared_at)) for each in questions]
    return outcomes(local, using=alias)


class SenderWorker:
    """The questions to one sender, each in a thread of its own, because a question may hang."""

    def __init__(self, name: str, *, using: str) -> None:
        self.name = name
        self.events = PreparedEvent.objects.using(using)
        self.backoff = Backoff(f"sender {name}", logger)
        self.decided = 0
        self._counting = threading.Lock()
        #: Each question's rows and start. The result is the error if there was no answer.
        self.under_way: dict[Future[Any], tuple[Sequence[PreparedEvent], float]] = {}
        self.hanging: list[Future[Any]] = []

    def turn(self) -> bool:
        """Collect answers, and ask about due events. Return whether there was anything to do."""
        busy = False
        for future, (rows, asked_at) in list(self.under_way.items()):
            if not future.done() and time.monotonic() - asked_at <= CLAIM_SECONDS:
                continue
            del self.under_way[future]
            busy = True
            if future.done():
                error = future.result()  # the keeper's own errors are raised
            else:  # say, its database was cut off, which its thread does not notice
                error = TimeoutError(f"no answer in {CLAIM_SECONDS:g} s")
                self._put_off(rows, "unreachable", error_text(error))
                self.hanging.append(future)
            if error:
                self.backoff.failed(error)
            elif len(self.hanging) < HANGING:  # else it is not asked, so policies must decide
                self.backoff.succeeded()
        # While the sender is unreachable, one question at a time shows when it is back.
        limit = 1 if self.backoff.failures else QUESTIONS
        self.hanging = [each for each in self.hanging if not each.done()]
        may_ask = not self.backoff.remaining and len(self.hanging) < HANGING
        while may_ask and len(self.under_way) < limit and (rows := self._claim()):
            self._start(rows)
            busy = True
        if self.backoff.failures or len(self.under_way) >= limit:
            self.expire()
        return busy

    def _claim(self) -> list[PreparedEvent]:
        rows = list(self.events.due(self.name).defer("content")[:BATCH])
        if rows:
            until = DatabaseNow() + timedelta(seconds=CLAIM_SECONDS)
            due = self.events.due(self.name).filter(pk__in=[row.pk for row in rows]).order_by()
            due.update(next_check_at=until, asked=F("asked") + 1)
            failpoint("check_claimed")
        return rows

    def _start(self, rows: Sequence[PreparedEvent]) -> None:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self._ask(rows))
            except BaseException as error:
                future.set_exception(error)
            finally:
                connections.close_all()  # of this thread

        # A daemon: a question that hangs does not keep the process from ending.
        threading.Thread(target=run, name=f"outbox-ask-{self.name}", daemon=True).start()
        self.under_way[future] = rows, time.monotonic()

    def _ask(self, rows: Sequence[PreparedEvent]) -> BaseException | None:
        questions = [
            Question(r.event_id, aware(r.prepared_at, using=self.events.db), r.stream, r.type)
            for r in rows
        ]
        try:
            answers = ask(self.name, questions)
        except BaseException as error:  # SystemExit of a function of the project, too
            self._put_off(rows, "unreachable", error_text(error))
            return error
        self.settle(rows, answers)
        return None

    def settle(self, rows: Sequence[PreparedEvent], answers: Mapping[UUID, str]) -> None:
        """Decide the events that have an outcome, and put off the others."""
        wanted: dict[UUID, str] = {}
        undecided: dict[str, list[PreparedEvent]] = {}
        for row in rows:
            answer = storable(str(answers.get(row.event_id, "no answer for this event")))
            if answer in DECIDES:
                wanted[row.event_id] = DECIDES[answer]
            else:
                undecided.setdefault(answer, []).append(row)
        self._decide(wanted, by=keeper.ANSWER)
        for answer, left in undecided.items():
            counter = "answered" if answer in (IN_PROGRESS, TOO_OLD) else "unreachable"
            self._put_off(left, counter, answer)

    def _put_off(self, rows: Sequence[PreparedEvent], counter: str, answer: str) -> None:
        events = self.events.open()
        changes = {
            counter: F(counter) + 1,
            "last_answer": replaced(answer, using=events.db)[:10_000],
        }
        for asked in {row.asked for row in rows}:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(asked, 10))
            later = DatabaseNow() + timedelta(seconds=pause * random.uniform(0.8, 1.2))
            in_time = When(decide_by__gt=DatabaseNow(), then=Least(later, F("decide_by")))
            events.filter(pk__in=[row.pk for row in rows if row.asked == asked]).update(
                next_check_at=Case(in_time, default=later), **changes
            )
        over = events.filter(pk__in=[row.pk for row in rows], decide_by__lte=DatabaseNow())
        self._expire(list(over))

    def expire(self) -> None:
        """Let their policies decide the events that are overdue without an answer."""
        due = self.events.due(self.name).filter(state=State.PREPARED, decide_by__lte=DatabaseNow())
        self._expire(list(due.order_by("decide_by")[:EXPIRED]))

    def _expire(self, rows: Sequence[PreparedEvent]) -> None:
        ends = [row for row in rows if row.policy in POLICIES and row.state == State.PREPARED]
        self._decide({row.event_id: POLICIES[row.policy] for row in ends}, by=keeper.POLICY)
        left = self.events.filter(pk__in=[row.pk for row in rows])
        over = left.filter(state=State.PREPARED, decide_by__lte=DatabaseNow())
        over = over.exclude(policy__in=POLICIES)
        if undecided := over.update(state=State.UNDECIDED, reason=UNDECIDED):
            logger.warning("Prepared events undecided sender=%s events=%d", self.name, undecided)
        left.filter(state=State.UNDECIDED).update(next_check_at=None)

    def _decide(self, wanted: Mapping[UUID, str], *, by: str) -> None:
        if not wanted:
            return
        try:
            answers = keeper.decide(self.name, wanted, by=by, using=self.events.db)
        except django.db.OperationalError as error:
            if not is_conflict(error):
                raise
            logger.warning(
                "Prepared events not decided yet, as rows are locked sender=%s", self.name
            )
            return
        with self._counting:
            self.decided += sum(each.state == wanted[each.event_id] for each in answers)


class CheckBack(LeasedLoop):
    def __init__(self, *, using: str, interval: float | None = None, **options: Any) -> None:
        super().__init__(
            resource="prepared",
            parts=PARTS,
            using=using,
            interval=INTERVAL if interval is None else interval,
            answer_seconds=ANSWER_SECONDS,
            logger=logger,
            **options,
        )
        self.workers: dict[str, SenderWorker] = {}
        self._decided = 0

    @property
    def done(self) -> int:
        return self._decided + sum(worker.decided for worker in self.workers.values())

    @property
    def trouble(self) -> str:
        silent = [f"{w.name}: {w.backoff.text}" for w in self.workers.values() if w.backoff.text]
        return "; ".join(filter(None, [self.backoff.text, *silent]))

    def _turn(self) -> bool:
        if self._share():
            self._take_senders()
        busy = any([worker.turn() for worker in self.workers.values()])
        if busy or not (under_way := self._under_way()):
            return busy
        wait(under_way, timeout=min(self.interval, 0.25), return_when=FIRST_COMPLETED)
        return True

    def _under_way(self) -> list[Future[Any]]:
        return [future for worker in self.workers.values() for future in worker.under_way]

    def _take_senders(self) -> None:
        """Keep one worker for each sender of an owned part."""
        parts = self.holder.owned
        owned = {name for name in self._senders() if crc32(name.encode()) % PARTS in parts}
        for name in owned.difference(self.workers):
            self.workers[name] = SenderWorker(name, using=self.using)
        for name in set(self.workers) - owned:
            self._decided += self.workers.pop(name).decided

    def _senders(self) -> list[str]:
        """Return the senders that have rows, by one index lookup for each sender."""
        names: list[str] = []
        rows = PreparedEvent.objects.using(self.using).order_by("sender")
        after = ""
        while found := rows.filter(sender__gt=after).values_list("sender", flat=True).first():
            names.append(after := found)
        return names

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and not busy

    def _pause(self) -> float:
        return min(self.interval, self.holder.beat_seconds)

    def _leave(self) -> None:
        wait(self._under_way(), timeout=LEAVE_SECONDS)
        super()._leave()
