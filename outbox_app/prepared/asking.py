"""The check-back: asks senders what became of the events that nothing was heard of.

A sender is asked by one process at a time, by the leases of the drain, with at most ``QUESTIONS``
under way and ``BATCH`` ids in each. Rows are claimed by moving their next check ahead, so a process
that dies leaves them to the next one; should two ask, both get the same answer. Only an explicit
answer counts: what is away, slow or broken is silent, is asked again later, and holds up itself
only. What its sender cannot say by ``decide_by`` its policy decides, or a person.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any
from uuid import UUID
from zlib import crc32

from django.db import connections
from django.db.models import F
from django.db.models.functions import Least

from ..aliases import outbox_alias
from ..conf import outbox_settings
from ..exceptions import UnknownPrepared
from ..failpoints import failpoint
from ..models import DatabaseNow, PreparedEvent
from ..process.backoff import Backoff, described
from ..process.lease import BEATS, LeaseHolder
from ..process.loop import ProcessLoop
from ..text import get_logger
from . import keeper
from .fences import COMMITTED, IN_PROGRESS, ROLLED_BACK, TOO_OLD
from .keeper import Decision
from .local import local_sender
from .questions import Question

logger = get_logger("outbox_app.prepared")

State, Policy = PreparedEvent.State, PreparedEvent.Policy
DECIDES = {COMMITTED: State.CONFIRMED, ROLLED_BACK: State.CANCELLED}

#: Senders are shared by the CRC-32 of their names, modulo this.
PARTS = 16
#: Questions to one sender under way, and ids in each.
QUESTIONS, BATCH = 4, 100
#: Seconds for which a claim keeps others away: longer than a question takes.
CLAIM_SECONDS = 30.0
#: Seconds until the second question about an event, and at most; each time twice as long.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
#: Rows of which the time is over that are decided at once.
EXPIRED = 500
INTERVAL = 1.0
ANSWER_SECONDS = 300.0


def sender_named(name: str) -> Any:
    """Return the sender of a name, to be asked. Raises ``UnknownPrepared``."""
    sender = local_sender(name)
    if sender is None:
        raise UnknownPrepared(
            f"There is no sender {name!r} to ask: no such alias, and no such peer."
        )
    return sender


class SenderWorker:
    """The questions to one sender."""

    def __init__(self, name: str, *, using: str) -> None:
        self.name = name
        self.using = using
        self.backoff = Backoff(f"sender {name}", logger)
        self.decided = 0
        self._pool = ThreadPoolExecutor(QUESTIONS, thread_name_prefix=f"outbox-ask-{name}")
        self.under_way: dict[Future[dict[UUID, str]], list[PreparedEvent]] = {}

    def turn(self) -> bool:
        """Take the answers that have come, and ask about what is due. Says whether it did."""
        ended = [future for future in self.under_way if future.done()]
        for future in ended:
            rows = self.under_way.pop(future)
            try:
                answers = future.result()
            except Exception as error:
                self._silent(rows, error)
            else:
                self.backoff.succeeded()
                self.settle(rows, answers)
        asked = False
        # Of a sender that is away one question at a time finds out when it is back.
        while not self.backoff.remaining and len(self.under_way) < (
            1 if self.backoff.failures else QUESTIONS
        ):
            if not (rows := self._claim()):
                break
            asked = True
            questions = [Question(r.event_id, r.prepared_at, r.stream, r.type) for r in rows]
            self.under_way[self._pool.submit(self._ask, questions)] = rows
        return asked or bool(ended)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, questions: Sequence[Question]) -> dict[UUID, str]:
        try:
            return dict(sender_named(self.name).check(questions))
        finally:
            connections.close_all()  # of this thread

    def _claim(self) -> list[PreparedEvent]:
        events = PreparedEvent.objects.using(self.using)
        rows = list(events.due(self.name)[:BATCH])
        if rows:
            until = DatabaseNow() + timedelta(seconds=CLAIM_SECONDS)
            due = events.due(self.name).filter(pk__in=[row.pk for row in rows]).order_by()
            due.update(next_check_at=until, asked=F("asked") + 1)
            failpoint("check_claimed")
        return rows

    def settle(self, rows: Sequence[PreparedEvent], answers: dict[UUID, str]) -> None:
        """Decide what was answered, and put off the rest."""
        decided = [
            Decision(row.event_id, DECIDES[answers[row.event_id]])
            for row in rows
            if answers.get(row.event_id) in DECIDES
        ]
        self._decide(decided, by=keeper.ANSWER)
        for answer, counter in (
            (IN_PROGRESS, "answered"),
            (TOO_OLD, "answered"),
            (None, "unreachable"),
        ):
            left = [row for row in rows if answers.get(row.event_id) == answer]
            if answer == TOO_OLD:
                self._give_up(left, "Its sender has removed the fences of its time.", answered=1)
            else:
                self._put_off(left, counter, answer or "no answer for this event")

    def _silent(self, rows: Sequence[PreparedEvent], error: Exception) -> None:
        self.backoff.failed(error)
        self._put_off(rows, "unreachable", described(error))
        self.expire()

    def _put_off(self, rows: Sequence[PreparedEvent], counter: str, answer: str) -> None:
        by_pause: dict[float, list[int]] = {}
        for row in rows:
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(row.asked, 10))
            by_pause.setdefault(pause, []).append(row.pk)
        events = PreparedEvent.objects.using(self.using)
        for pause, pks in by_pause.items():
            later = DatabaseNow() + timedelta(seconds=pause * random.uniform(0.8, 1.2))
            told = {counter: F(counter) + 1, "last_answer": answer[:10_000]}
            waiting = events.filter(pk__in=pks, decide_by__gt=DatabaseNow())
            waiting.open().update(next_check_at=Least(later, F("decide_by")), **told)
        over = events.filter(pk__in=[row.pk for row in rows], decide_by__lte=DatabaseNow())
        over.open().update(**{counter: F(counter) + 1, "last_answer": answer[:10_000]})
        self._expire(over.open())

    def expire(self) -> None:
        """Let their policies decide events whose time is over, although nobody answers."""
        due = PreparedEvent.objects.using(self.using).due(self.name)
        self._expire(due.filter(decide_by__lte=DatabaseNow()))

    def _expire(self, events: Any) -> None:
        rows = list(events[:EXPIRED])
        for policy, state in ((Policy.CONFIRM, State.CONFIRMED), (Policy.CANCEL, State.CANCELLED)):
            chosen = [Decision(row.event_id, state) for row in rows if row.policy == policy]
            self._decide(chosen, by=keeper.POLICY)
        asking = [row for row in rows if row.policy not in (Policy.CONFIRM, Policy.CANCEL)]
        self._give_up(asking, "Its sender could not say in time what became of it.")

    def _give_up(self, rows: Sequence[PreparedEvent], why: str, *, answered: int = 0) -> None:
        if rows:
            events = PreparedEvent.objects.using(self.using).open()
            events.filter(pk__in=[row.pk for row in rows]).update(
                state=State.UNDECIDED,
                next_check_at=None,
                reason=why,
                answered=F("answered") + answered,
            )
            logger.warning("Undecided sender=%s events=%d reason=%s", self.name, len(rows), why)

    def _decide(self, decisions: Sequence[Decision], *, by: str) -> None:
        if decisions:
            keeper.decide(self.name, decisions, by=by, using=self.using)
            self.decided += len(decisions)


class CheckBack(ProcessLoop):
    """Asks the senders of one keeper."""

    def __init__(
        self,
        *,
        using: str | None = None,
        interval: float | None = None,
        lease_seconds: float | None = None,
        on_turn: Callable[[CheckBack], None] | None = None,
    ) -> None:
        self.lease_seconds = lease_seconds or outbox_settings().LEASE_SECONDS
        super().__init__(
            using=using or outbox_alias(),
            interval=INTERVAL if interval is None else interval,
            answer_seconds=ANSWER_SECONDS,
            channel="outbox_prepared",
            on_turn=on_turn,
            logger=logger,
        )
        self.holder = LeaseHolder(
            using=self.using,
            lease_seconds=self.lease_seconds,
            resource="prepared",
            parts=PARTS,
        )
        self.backoff = Backoff("database", logger)
        self.workers: dict[str, SenderWorker] = {}
        self._decided = 0

    @property
    def done(self) -> int:
        """Events decided by now."""
        return self._decided + sum(worker.decided for worker in self.workers.values())

    @property
    def trouble(self) -> str:
        silent = [f"{w.name}: {w.backoff.text}" for w in self.workers.values() if w.backoff.text]
        return "; ".join(filter(None, [self.backoff.text, *silent]))

    def run(self, *, once: bool = False) -> int:
        """Run until ``stop()``; with ``once``, until nothing is due. Return how many it decided."""
        self._loop(once=once)
        return self.done

    def _step(self, *, once: bool) -> bool | None:
        return self._run_or_back_off(self._turn, self.backoff)  # type: ignore[no-any-return]

    def _turn(self) -> bool:
        self._share()
        busy = any([worker.turn() for worker in self.workers.values()])
        under_way = [future for w in self.workers.values() for future in w.under_way]
        if not busy and under_way:
            wait(under_way, timeout=min(self.interval, 0.25), return_when=FIRST_COMPLETED)
            return True
        return busy

    def _share(self) -> None:
        holder = self.holder
        if not holder.joined:
            holder.join()
        elif holder.beat_is_due():
            holder.beat(done=self.done, trouble=self.trouble)
        elif not holder.sharing_is_due():
            return
        if holder.sharing_is_due():
            holder.rebalance()
        owned = {name for name in self._senders() if crc32(name.encode()) % PARTS in holder.owned}
        for name in owned.difference(self.workers):
            self.workers[name] = SenderWorker(name, using=self.using)
        for name in set(self.workers) - owned:
            worker = self.workers.pop(name)
            self._decided += worker.decided
            worker.close()

    def _senders(self) -> list[str]:
        """Return the senders that there are rows of: a look at the index for each."""
        names: list[str] = []
        rows = PreparedEvent.objects.using(self.using).order_by("sender")
        after = ""
        while found := rows.filter(sender__gt=after).values_list("sender", flat=True).first():
            names.append(after := found)
        return names

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and not busy

    def _pause(self) -> float:
        return min(self.interval, self.lease_seconds / BEATS)

    def _leave(self) -> None:
        for worker in self.workers.values():
            worker.close()
        if self.holder.joined:
            self._hand_back(self._hand_over, self.backoff)

    def _hand_over(self) -> None:
        self.holder.leave()
