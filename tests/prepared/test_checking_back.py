"""The check-back: which sender it asks, when, how often, and the effect of each answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.utils import timezone

from outbox_app.database.clock import DatabaseNow
from outbox_app.models import Incident
from outbox_app.prepared import (
    COMMITTED,
    IN_PROGRESS,
    cancel,
    check_back,
    checking_back,
    confirm,
    keeper,
)
from outbox_app.prepared import fences as fences_module
from outbox_app.prepared.checking_back import CheckBack, SenderWorker
from outbox_app.prepared.exceptions import FencedOut
from outbox_app.prepared.fences import Question
from outbox_app.prepared.keeper import CALL
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.prepared.request import NewPrepared, checked
from outbox_app.process import backoff
from tests.patience import eventually, patience

from .conftest import FULL

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
PAST = timedelta(seconds=-1)


class Sender:
    """One that gives the same answer to each question, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[int] = []

    def __call__(self, name: str, given: Any) -> Any:
        self.asked.append(len(given))
        if isinstance(self.answer, Exception):
            raise self.answer
        if callable(self.answer):
            return self.answer(given)
        return {each.event_id: self.answer for each in given}


@pytest.fixture
def answering(monkeypatch: Any) -> Callable[..., Sender]:
    """``answering(answer)``: replace all senders by one with this answer."""

    def use(answer: Any) -> Sender:
        sender = Sender(answer)
        monkeypatch.setattr(checking_back, "ask", sender)
        return sender

    return use


@pytest.fixture
def own(monkeypatch: Any) -> None:
    """Forget the functions that a test registers."""
    monkeypatch.setattr(fences_module, "_functions", [])


def move(alias: str, **moments: timedelta) -> None:
    """Set columns of all rows to so long from now."""
    changes = {name: DatabaseNow() + moment for name, moment in moments.items()}
    PreparedEvent.objects.using(alias).update(**changes)


def the_row(alias: str) -> Any:
    return PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()


@contextmanager
def running(alias: str, **options: Any) -> Iterator[CheckBack]:
    loop = CheckBack(using=alias, interval=0.05, **options)

    def run() -> None:
        try:
            loop.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(patience())
    assert not thread.is_alive()


def test_nobody_is_asked_before_the_time(
    alias: str, make: Any, pay: Any, ask: Any, in_log: Any
) -> None:
    pay(make(immune=10))
    assert ask().done == 0
    assert the_row(alias).asked == 0
    move(alias, next_check_at=PAST)
    assert ask().done == 1
    row = the_row(alias)
    assert (row.state, row.decided_by, row.next_check_at) == ("confirmed", "answer", None)
    assert len(in_log()) == 1


def test_pauses(alias: str, make: Any, ask: Any, answering: Any) -> None:
    make()
    answering(IN_PROGRESS)
    for n, pause in enumerate([10, 20, 40, 80, 160, 300, 300]):
        move(alias, next_check_at=PAST)
        ask()
        row = the_row(alias)
        assert 0.75 * pause < (row.next_check_at - row.now).total_seconds() < 1.25 * pause
        assert (row.asked, row.answered, row.unreachable) == (n + 1, n + 1, 0)
        assert (row.state, row.last_answer) == ("prepared", "in_progress")
    # Never later than it is decided.
    move(alias, next_check_at=PAST, decide_by=timedelta(seconds=5))
    ask()
    row = the_row(alias)
    assert row.next_check_at == row.decide_by


def test_each_event_has_a_pause_of_its_own(alias: str, make: Any, ask: Any, answering: Any) -> None:
    answering(IN_PROGRESS)
    for stream in "ab":
        make(stream)
    rows = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).order_by("stream")
    rows.filter(stream="a").update(asked=3)
    ask()
    for row, pause in zip(rows, (80, 10), strict=True):
        assert 0.75 * pause < (row.next_check_at - row.now).total_seconds() < 1.25 * pause
        assert row.answered == 1


def test_who_asks_looks_as_often_as_is_said_and_its_leases_need(alias: str) -> None:
    pauses = [CheckBack(using=alias, lease_seconds=10, interval=n)._pause() for n in (0.05, 60)]
    assert pauses == [0.05, 2]


@pytest.mark.parametrize("answer", [IN_PROGRESS, "too_old", OSError("away")])
def test_policies(alias: str, answer: Any, make: Any, ask: Any, answering: Any) -> None:
    """Senders are asked a last time; then the policies decide."""
    for policy in ("ask", "cancel", "confirm"):
        make(policy=policy)
    sender = answering(answer)
    rows = PreparedEvent.objects.using(alias).order_by("id")
    ask()
    counts = {(row.answered, row.unreachable) for row in rows}
    assert counts == {(0, 1) if isinstance(answer, OSError) else (1, 0)}
    assert {row.state for row in rows} == {"prepared"}
    move(alias, next_check_at=PAST, decide_by=PAST)
    ask()
    assert [(row.state, row.decided_by, row.next_check_at) for row in rows.all()] == [
        ("undecided", "", None),
        ("cancelled", "policy", None),
        ("confirmed", "policy", None),
    ]
    assert rows.all()[0].reason == checking_back.UNDECIDED
    assert len(sender.asked) == 2


@pytest.mark.parametrize("why", ["hangs", "hangs for some", "away"])
def test_policies_decide_of_a_sender_that_is_not_asked(
    alias: str, why: str, make: Any, answering: Any
) -> None:
    sender = answering(COMMITTED)
    for policy in ("ask", "confirm", "cancel"):
        make(policy=policy)
    move(alias, decide_by=PAST, next_check_at=PAST)
    rows = PreparedEvent.objects.using(alias).order_by("id")
    rows.filter(policy="cancel").update(state="undecided")  # a person has it asked about again
    worker = SenderWorker(rows[0].sender, using=alias)
    if why == "hangs":
        worker.under_way = {
            Future(): ((), time.monotonic()) for _ in range(checking_back.QUESTIONS)
        }
    elif why == "hangs for some":
        answered: Future[None] = Future()
        answered.set_result(None)
        worker.under_way = {answered: ((), time.monotonic())}
        worker.hanging = [Future() for _ in range(checking_back.HANGING)]
        worker.backoff.failed(TimeoutError("no answer"))
    else:
        worker.backoff.failed(OSError("away"))
        worker.backoff.wait_until(time.monotonic() + patience())
    worker.turn()
    assert [(row.state, row.next_check_at is None) for row in rows.all()] == [
        ("undecided", True),
        ("confirmed", True),
        ("undecided", False),
    ]
    assert sender.asked == []


@pytest.mark.parametrize("moment", ["claimed", "asked"])
def test_what_is_decided_meanwhile_is_not_asked_about_again(
    alias: str, moment: str, make: Any, ask: Any, answering: Any, monkeypatch: Any
) -> None:
    event = make()
    real = checking_back.DatabaseNow

    def decide(*args: Any) -> Any:
        if the_row(alias).state == "prepared":
            keeper.decide(
                f"alias:{event.using}", {event.event_id: "cancelled"}, by=CALL, using=alias
            )
        return real() if moment == "claimed" else {event.event_id: IN_PROGRESS}

    answering(decide if moment == "asked" else IN_PROGRESS)
    if moment == "claimed":
        monkeypatch.setattr(checking_back, "DatabaseNow", decide)
    ask()
    row = the_row(alias)
    assert (row.state, row.next_check_at) == ("cancelled", None)


@pytest.mark.parametrize("then", ["confirmed", "prepared"])
def test_an_event_that_changes_before_its_time_is_up(alias: str, then: str, make: Any) -> None:
    """Its sender has confirmed it, or a person has given it more time."""
    event = make()
    move(alias, decide_by=PAST)
    rows = list(PreparedEvent.objects.using(alias))
    if then == "confirmed":
        keeper.decide(rows[0].sender, {event.event_id: "confirmed"}, by=CALL, using=alias)
    else:
        move(alias, decide_by=timedelta(seconds=60))
    SenderWorker(rows[0].sender, using=alias)._expire(rows)
    assert the_row(alias).state == then


def test_a_policy_decides_later_where_others_hold_locks(
    alias: str, make: Any, ask: Any, answering: Any
) -> None:
    def held(*args: Any, **options: Any) -> None:
        raise OperationalError(1205, "Lock wait timeout exceeded")

    answering(IN_PROGRESS)
    for policy in ("cancel", "ask"):
        make(policy=policy)
    move(alias, decide_by=PAST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "decide", held)
        ask()
    rows = PreparedEvent.objects.using(alias).order_by("id")
    assert [row.state for row in rows] == ["prepared", "undecided"]
    assert [row.next_check_at is None for row in rows] == [False, True]
    rows.filter(state="prepared").update(next_check_at=DatabaseNow() + PAST)
    ask()
    assert [row.state for row in rows.all()] == ["cancelled", "undecided"]


def test_an_error_of_the_keepers_database_is_its_own(
    alias: str, make: Any, ask: Any, answering: Any
) -> None:
    """Not the sender's; what it has answered is asked again."""

    def fail(*args: Any, **options: Any) -> None:
        raise OperationalError("disk full")

    answering(COMMITTED)
    make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "decide", fail)
        trouble = ask().trouble
    assert "disk full" in trouble
    assert "alias:" not in trouble
    row = the_row(alias)
    assert (row.state, row.asked, row.unreachable) == ("prepared", 1, 0)
    move(alias, next_check_at=PAST)
    assert ask().trouble == ""
    assert the_row(alias).state == "confirmed"


def test_a_process_that_stops_takes_the_answers_that_come(
    alias: str, make: Any, answering: Any
) -> None:
    loop, left = CheckBack(using=alias), threading.Event()

    def answer(given: Any) -> Any:
        loop.stop()
        left.wait(0.2)  # longer than it takes to leave
        return {each.event_id: COMMITTED for each in given}

    make()
    answering(answer)
    try:
        assert loop.run() == 1
        assert the_row(alias).state == "confirmed"
    finally:
        left.set()


def test_a_policy_decides_nothing_that_waits_for_a_person(
    alias: str, make: Any, ask: Any, answering: Any
) -> None:
    answering(IN_PROGRESS)
    make(policy="confirm")
    PreparedEvent.objects.using(alias).update(state="undecided", reason="edited by hand")
    move(alias, decide_by=PAST)
    ask()
    row = the_row(alias)
    assert (row.state, row.next_check_at) == ("undecided", None)


@pytest.mark.parametrize("then", ["confirm", "cancel", "asked again", "asked in vain"])
def test_after_it_was_undecided(
    alias: str, then: str, make: Any, pay: Any, ask: Any, answering: Any, in_log: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking_back, "ask", Sender(OSError("away")))
        event = make()
        move(alias, decide_by=PAST)
        ask()
    assert the_row(alias).state == "undecided"
    state = "confirmed"
    if then == "cancel":
        cancel(event)
        state = "cancelled"
    elif then == "confirm":
        pay(event)
        confirm(event)
    else:
        pay(event)
        if then == "asked in vain":
            answering(IN_PROGRESS)
            state = "undecided"
        move(alias, next_check_at=PAST)
        ask()
    row = the_row(alias)
    assert (row.state, row.next_check_at) == (state, None)
    assert len(in_log()) == (state == "confirmed")


def test_only_what_it_has_decided_is_done(
    alias: str, make: Any, sender: str, ask: Any, answering: Any, states: Any
) -> None:
    """A person has confirmed one of them while its sender was asked, who says the contrary."""
    first, _ = make(), make()

    def contradict(given: Any) -> Any:
        by, wanted = "ann", {first.event_id: "confirmed"}
        keeper.decide(f"alias:{sender}", wanted, by=by, reason="", using=alias)
        return {each.event_id: "rolled_back" for each in given}

    answering(contradict)
    move(alias, next_check_at=PAST)
    assert (ask().done, states()) == (1, ["confirmed", "cancelled"])


def test_attempts_are_not_counted(
    alias: str, make: Any, pay: Any, ask: Any, answering: Any, monkeypatch: Any, in_log: Any
) -> None:
    """A sender that is away spends none of its budget: there is none."""
    pay(make())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking_back, "ask", Sender(ConnectionError("refused")))
        for _ in range(6):
            move(alias, next_check_at=PAST)
            loop = ask()
            assert "refused" in loop.trouble
    row = the_row(alias)
    assert (row.state, row.asked, row.answered, row.unreachable) == ("prepared", 6, 0, 6)
    assert "refused" in row.last_answer
    move(alias, next_check_at=PAST)
    ask()
    assert (the_row(alias).state, len(in_log())) == ("confirmed", 1)


def test_only_an_explicit_answer_counts(
    alias: str, make: Any, ask: Any, answering: Any, states: Any
) -> None:
    answers = ["yes", "", None, 500, ["committed"], {"a": 1}, "nul\x00", "COMMITTED"]
    ids = {make().event_id: answer for answer in answers}
    make()
    answering(lambda given: ids)
    ask()
    assert states() == ["prepared"] * 9
    for row in PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()):
        assert (row.asked, row.answered, row.unreachable) == (1, 0, 1)
        assert row.next_check_at > row.now + timedelta(seconds=5)
    assert row.last_answer == "no answer for this event"


def test_a_fence_that_was_edited_by_hand(alias: str, sender: str, make: Any, ask: Any) -> None:
    event = make()
    Fence.objects.using(sender).create(event_id=event.event_id, outcome="perhaps")
    ask()
    row = the_row(alias)
    assert (row.state, row.last_answer, row.unreachable) == ("prepared", "perhaps", 1)
    with pytest.raises(FencedOut, match="perhaps"):
        confirm(event)


def test_a_sender_that_is_unknown_stays_visible(alias: str, ask: Any) -> None:
    keeper.prepare("alias:gone", [checked(NewPrepared("s", "t", immune=0))], using=alias)
    loop = ask()
    assert "alias:gone" in loop.trouble
    row = the_row(alias)
    assert (row.state, row.unreachable) == ("prepared", 1)
    assert "There is no sender 'alias:gone'" in row.last_answer


def test_many_in_questions_of_a_hundred(
    alias: str, sender: str, pay: Any, make: Any, answering: Any, ask: Any, states: Any
) -> None:
    real = partial(checking_back.ask, f"alias:{sender}")
    requests = [checked(NewPrepared(f"s{n % 40}", "t", {}, immune=0)) for n in range(250)]
    keeper.prepare(f"alias:{sender}", requests, using=alias)
    fences = [Fence(event_id=r.event_id, outcome="committed") for r in requests[::2]]
    Fence.objects.using(sender).bulk_create(fences)
    seen = answering(real)
    assert ask().done == 250
    assert sorted(seen.asked) == [50, 100, 100]
    assert states() == ["confirmed", "cancelled"] * 125


def test_a_sender_that_hangs_holds_up_itself(
    alias: str, make: Any, pay: Any, monkeypatch: Any
) -> None:
    """Another one is served, its own policies decide, and the process can be stopped."""
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.05)
    go = threading.Event()

    def hang(given: Any) -> Any:
        go.wait(60)
        return {}

    real = checking_back.ask

    def ask(name: str, given: Any) -> Any:
        return hang(given) if name == "alias:hung" else real(name, given)

    monkeypatch.setattr(checking_back, "ask", ask)
    monkeypatch.setattr(checking_back, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(checking_back, "QUESTIONS", 1)
    monkeypatch.setattr(checking_back, "BATCH", 1)
    hung = [checked(NewPrepared("s", "t", immune=0, policy="cancel")) for _ in range(2)]
    keeper.prepare("alias:hung", hung, using=alias)
    rows = PreparedEvent.objects.using(alias)
    with running(alias, lease_seconds=1) as loop:
        eventually(lambda: rows.filter(sender="alias:hung", asked=1).exists())
        pay(make())
        eventually(lambda: rows.filter(state="confirmed").exists(), "the other one is served")
        rows.filter(sender="alias:hung").update(
            decide_by=DatabaseNow() + PAST, next_check_at=DatabaseNow() + PAST
        )
        eventually(lambda: rows.filter(state="cancelled", decided_by="policy").count() == 2)
        eventually(lambda: loop.done == 3, "all are counted")
    go.set()


def test_questions_that_never_end_are_asked_again(
    alias: str, make: Any, pay: Any, answering: Any, monkeypatch: Any
) -> None:
    """As where the sender's database was cut off: nothing ever tells their threads so."""
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.05)
    monkeypatch.setattr(checking_back, "BATCH", 1)
    monkeypatch.setattr(checking_back, "CLAIM_SECONDS", 0.3)
    monkeypatch.setattr(checking_back, "FIRST_PAUSE", 0.1)
    ends = threading.Event()

    def hang(given: Any) -> Any:
        ends.wait(60)
        return {}

    seen = answering(hang)
    events = [make(f"order-{n}") for n in range(checking_back.QUESTIONS)]
    pay(*events)
    rows = PreparedEvent.objects.using(alias)
    try:
        with running(alias) as loop:
            eventually(lambda: len(seen.asked) >= checking_back.QUESTIONS)
            eventually(lambda: "no answer in 0.3 s" in loop.trouble)
            assert rows.filter(unreachable__gte=1).exists()
            seen.answer = COMMITTED
            eventually(lambda: not rows.open().exists())
    finally:
        ends.set()


def test_only_so_many_questions_hang(
    alias: str, make: Any, pay: Any, answering: Any, monkeypatch: Any
) -> None:
    """Over a weekend they would take all threads and connections. It asks again when one ends."""
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.0)
    limits = {"QUESTIONS": 1, "BATCH": 1, "CLAIM_SECONDS": -1.0, "FIRST_PAUSE": 0.0, "HANGING": 3}
    for name, value in limits.items():
        monkeypatch.setattr(checking_back, name, value)
    ends = threading.Event()
    seen = answering(lambda given: ends.wait(60) and {})
    pay(make())
    rows = PreparedEvent.objects.using(alias)
    worker = SenderWorker(rows.get().sender, using=alias)
    try:
        for _ in range(8):
            worker.turn()
        assert len(seen.asked) == len(worker.hanging) == 3
    finally:
        ends.set()
    seen.answer = COMMITTED
    eventually(lambda: worker.turn() and not rows.open().exists())


@pytest.mark.timeout(1200 if FULL else 120)
def test_a_sender_that_comes_back_is_not_stormed(
    alias: str, sender: str, answering: Any, monkeypatch: Any
) -> None:
    """While it is away one question at a time finds out; then four, and all is decided."""
    count, batch = (100_000, checking_back.BATCH) if FULL else (300, 20)
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.05)
    monkeypatch.setattr(checking_back, "BATCH", batch)
    name, real = f"alias:{sender}", partial(checking_back.ask, f"alias:{sender}")
    for first in range(0, count, 500):
        size = min(500, count - first)
        requests = [checked(NewPrepared(f"s{n % 9}", "t", {}, immune=0)) for n in range(size)]
        keeper.prepare(name, requests, using=alias)
    rows = PreparedEvent.objects.using(alias)
    under_way, away, back = threading.Semaphore(100), [], []

    def refuse(given: Any) -> Any:
        with under_way:
            away.append(100 - under_way._value)
            raise ConnectionError("refused")

    def answer(given: Any) -> Any:
        with under_way:
            back.append((100 - under_way._value, len(given)))
            return real(given)

    seen = answering(refuse)
    with running(alias) as loop:
        eventually(lambda: len(away) >= 8)
        # Four at the beginning, when nothing was known of it; then one at a time.
        assert max(away[4:]) == 1
        seen.answer = answer
        eventually(lambda: back)  # so the last one that was refused has been put off
        begin = time.monotonic()
        rows.open().update(next_check_at=DatabaseNow() + PAST)  # an hour has passed
        eventually(lambda: not rows.open().exists(), seconds=60 + count / 100)
        seconds = time.monotonic() - begin
        eventually(lambda: loop.trouble == "")
    print(f"{len(back)} questions in {seconds:.1f} s about {count} events")
    at_once, sizes = zip(*back, strict=True)
    assert max(at_once) <= checking_back.QUESTIONS
    assert max(sizes) <= batch
    assert count <= sum(sizes) <= count + batch * checking_back.QUESTIONS  # each once
    assert rows.filter(state="cancelled").count() == count
    assert loop.done >= count


def test_four_at_once(alias: str, sender: str, elsewhere: Any, in_log: Any, states: Any) -> None:
    """As when processes that were stopped go on: two ask, and both get the same answer."""
    name = f"alias:{sender}"
    requests = [checked(NewPrepared(f"s{n}", "t", {}, immune=0)) for n in range(60)]
    keeper.prepare(name, requests, using=alias)
    fences = [Fence(event_id=r.event_id, outcome="committed") for r in requests[::2]]
    Fence.objects.using(sender).bulk_create(fences)
    rows = list(PreparedEvent.objects.using(alias).due(name))
    barrier = threading.Barrier(4)

    def work() -> None:
        worker = SenderWorker(name, using=alias)
        barrier.wait()
        assert worker._ask(rows) is None

    for done in [elsewhere(work) for _ in range(4)]:
        done.result()
    assert states() == ["confirmed", "cancelled"] * 30
    assert sorted(stream for stream, _, _ in in_log()) == sorted(f"s{n}" for n in range(0, 60, 2))
    assert not Incident.objects.using(alias).exists()


def test_a_sender_has_one_owner(alias: str, make: Any, ask: Any, answering: Any) -> None:
    """Parts are leased: of two processes one asks."""
    make()
    seen = answering(IN_PROGRESS)
    with running(alias) as first:
        eventually(lambda: first.holder.owned)
        eventually(lambda: len(seen.asked) == 1)
        with running(alias) as second:
            eventually(lambda: second.holder.joined)
            for loop in (first, second):
                assert len(loop.workers) <= 1
    assert len(seen.asked) == 1


def test_a_sender_of_a_part_that_was_lost_is_asked_no_more(
    alias: str, make: Any, ask: Any, answering: Any
) -> None:
    make()
    answering(COMMITTED)
    loop = ask()
    loop.holder.owned = frozenset()
    loop._take_senders()
    assert (loop.workers, loop.done) == ({}, 1)


@pytest.mark.usefixtures("own")
def test_functions_of_the_projects_own(
    alias: str, sender: str, make: Any, ask: Any, fences: Any
) -> None:
    says = {
        "a": (COMMITTED, "confirmed"),
        "b": (IN_PROGRESS, "prepared"),
        "c": (None, "cancelled"),
        "d": ("rolled_back", "prepared"),  # only a fence says so
        "e": (ValueError("broken"), "prepared"),
    }
    asked = []

    @check_back("order.*")
    def answer(question: Any) -> Any:
        asked.append(question)
        result = says[question.stream][0]
        if isinstance(result, Exception):
            raise result
        return result

    @check_back("other.*")
    def other(question: Any) -> Any:
        raise AssertionError(question)

    events = {stream: make(stream) for stream in says}
    ask()
    for row in PreparedEvent.objects.using(alias).all():
        assert row.state == says[row.stream][1], row.stream
    assert {(q.event_id, q.stream, q.type) for q in asked} == {
        (event.event_id, stream, "order.paid") for stream, event in events.items()
    }
    assert sorted(fences()) == ["committed", "rolled_back"]


@pytest.mark.usefixtures("own")
def test_functions_are_asked_in_the_zone_of_the_project(
    alias: str, sender: str, make: Any, ask: Any, fences: Any, settings: Any
) -> None:
    """As ``timezone.now()``, also where a database without zones has its times in another one."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Tokyo"
    ages = []

    @check_back("order.*")
    def answer(question: Any) -> Any:
        ages.append(timezone.now() - question.prepared_at)
        return IN_PROGRESS

    make("a")
    ask()
    [age] = ages
    assert abs(age) < timedelta(minutes=30)


@pytest.mark.usefixtures("own")
def test_a_sender_with_a_function_confirms_without_a_fence(
    alias: str, sender: str, make: Any, fences: Any, in_log: Any
) -> None:
    check_back("order.*")(lambda question: COMMITTED)
    confirm(make())
    assert fences() == ["committed"]
    assert len(in_log()) == 1


@pytest.mark.usefixtures("own")
def test_a_function_knows_what_fences_have_forgotten(alias: str, sender: str, make: Any) -> None:
    check_back("order.*")(lambda question: COMMITTED)
    event = make()
    fences_module.mark_pruned(event.prepared_at + timedelta(days=1), using=sender)
    question = Question(event.event_id, event.prepared_at, "", "order.paid")
    assert checking_back.ask(f"alias:{sender}", [question]) == {event.event_id: COMMITTED}


@pytest.mark.usefixtures("own")
def test_functions_that_take_long(alias: str, sender: str, make: Any, monkeypatch: Any) -> None:
    """When the time of an answer is over no other function is called: it would answer nothing."""
    monkeypatch.setattr(fences_module, "ANSWER_SECONDS", 0.2)
    asked = []

    @check_back("order.*")
    def answer(question: Any) -> Any:
        asked.append(question)
        time.sleep(0.3)
        return COMMITTED

    events = [make(f"order-{n}") for n in range(3)]
    asked_of = [Question(each.event_id, each.prepared_at, "", "order.paid") for each in events]
    found = checking_back.ask(f"alias:{sender}", asked_of)
    assert len(asked) <= 1
    assert list(found.values()).count(IN_PROGRESS) >= 2


@pytest.mark.usefixtures("own")
def test_a_function_that_would_end_the_process(
    alias: str, sender: str, make: Any, ask: Any
) -> None:
    """It ends neither the process nor the questions to other senders."""

    @check_back("order.*")
    def answer(question: Any) -> Any:
        raise SystemExit(3)

    make()
    ask()
    assert the_row(alias).last_answer == "SystemExit: 3"


@pytest.mark.usefixtures("own")
def test_a_function_is_called_in_no_transaction(alias: str, sender: str, make: Any) -> None:
    inside = []

    @check_back("order.*")
    def answer(question: Any) -> Any:
        inside.append(connections[sender].in_atomic_block)
        return COMMITTED

    event = make()
    with suppress(FencedOut), transaction.atomic(using=sender):
        confirm(event)
    assert inside == [False]


def test_the_senders_that_there_are(alias: str) -> None:
    names = ["alias:b", "Alias:b", "alias:a", "peer", "ä"]
    for name in names * 2:
        keeper.prepare(name, [checked(NewPrepared("s", "t"))], using=alias)
    assert sorted(CheckBack(using=alias)._senders()) == sorted(names)
