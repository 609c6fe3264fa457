"""The keeper: each call in each state, races, damaged rows, and the rows that it locks."""

from __future__ import annotations

import threading
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox_app.events.log.newevent import canonical
from outbox_app.events.log.publish import publish
from outbox_app.events.models import Event
from outbox_app.events.signals import events_published
from outbox_app.exceptions import NotAtomic
from outbox_app.failpoints import set_failpoint
from outbox_app.models import Incident
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.keeper import Answer
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from outbox_app.signals import incident_recorded
from tests.faults.tools import on

from .conftest import FULL

committing = pytest.mark.django_db(transaction=True)
RACES = 1000 if FULL else 15
SENDER = "alias:billing"


def request(stream: str = "order-17", **options: Any) -> PreparedEvent:
    return checked(NewPrepared(stream, "order.paid", **{"data": {"total": 30}, **options}))


def prepare(alias: str, *requests: PreparedEvent) -> list[str]:
    return [answer.state for answer in keeper.prepare(SENDER, requests, using=alias)]


def decide(alias: str, *decisions: tuple[UUID, str], by: str = keeper.CALL) -> list[Answer]:
    return keeper.decide(SENDER, dict(decisions), by=by, using=alias)


def move(alias: str, given: PreparedEvent, state: str) -> None:
    """Bring an event into a state."""
    if state != "unknown":
        prepare(alias, given)
    if state == "undecided":
        PreparedEvent.objects.using(alias).update(state=state)
    elif state in ("confirmed", "cancelled"):
        decide(alias, (given.event_id, state))


@pytest.mark.parametrize("error", [IntegrityError, OperationalError])
def test_what_is_refused_each_time_ends(alias: str, error: Any, monkeypatch: Any) -> None:
    """Not only as an id is taken, or others hold locks: it is not tried for ever."""
    tried = []

    def step(first: bool) -> None:
        tried.append(first)
        raise error("refused")

    taken = error is IntegrityError
    monkeypatch.setattr(keeper, "LOCK_SECONDS", 0.0 if taken else 1.0)
    with pytest.raises(error):
        keeper._in_transaction(step, alias)
    assert tried == ([True, False] if taken else [True])


def test_an_error_of_the_database_is_met_once(alias: str, monkeypatch: Any) -> None:
    """Halves of what it has failed for would fail as well."""
    tried = []

    def fail(*args: Any) -> None:
        tried.append(args)
        raise OperationalError("server closed the connection")

    monkeypatch.setattr(keeper, "_decide", fail)
    with pytest.raises(OperationalError, match="server closed"):
        decide(alias, *[(uuid4(), "confirmed") for _ in range(4)])
    assert len(tried) == 1


@committing
@on("mariadb")
@pytest.mark.parametrize("number", [1644, 3751])
def test_an_event_that_a_trigger_of_the_log_refuses_holds_up_no_other(
    alias: str, number: int, states: Any, in_log: Any
) -> None:
    """Its error is of the class of a lost database, as all of MySQL's refusals of a row are."""
    given = [request(f"order-{n}") for n in range(4)]
    prepare(alias, *given)
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER refuses BEFORE INSERT ON outbox_event FOR EACH ROW BEGIN IF NEW.stream "
            f"= 'order-2' THEN SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}; END IF; END"
        )
        try:
            decide(alias, *[(each.event_id, "confirmed") for each in given])
        finally:
            cursor.execute("DROP TRIGGER refuses")
    assert states() == ["confirmed", "confirmed", "undecided", "confirmed"]
    assert len(in_log()) == 3
    assert str(number) in PreparedEvent.objects.using(alias).get(stream="order-2").reason


@committing
def test_with_autocommit_off_nothing_is_said_to_be_recorded(alias: str) -> None:
    """A sender would commit, and what it has prepared would be gone with the request."""
    given = request()
    prepare(alias, given)
    connections[alias].set_autocommit(False)
    try:
        with pytest.raises(NotAtomic, match="would not commit"):
            prepare(alias, request())
        with pytest.raises(NotAtomic, match="would not commit"):
            decide(alias, (given.event_id, "confirmed"))
    finally:
        connections[alias].rollback()
        connections[alias].set_autocommit(True)
    assert [row.state for row in PreparedEvent.objects.using(alias).all()] == ["prepared"]


@committing
@pytest.mark.parametrize(
    ("point", "left"), [("decided", "prepared"), ("decided_committed", "confirmed")]
)
def test_the_time_limit_of_a_task_is_no_fault_of_the_event(
    alias: str, point: str, left: str, states: Any
) -> None:
    """It comes at any line; an event that is undecided waits for a person."""

    def end() -> None:
        raise SoftTimeLimitExceeded

    many = [request(f"order-{n}") for n in range(2)]
    prepare(alias, *many)
    set_failpoint(point, end)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            decide(alias, *[(each.event_id, "confirmed") for each in many])
    finally:
        set_failpoint(point, None)
    assert states() == [left] * 2


@pytest.mark.parametrize(
    ("state", "answer"),
    [
        ("unknown", "prepared"),
        ("prepared", "prepared"),
        ("undecided", "undecided"),
        ("confirmed", "confirmed"),
        ("cancelled", "cancelled"),
    ],
)
def test_prepare(alias: str, state: str, answer: str, in_log: Any) -> None:
    given = request()
    move(alias, given, state)
    for _ in range(2):
        assert prepare(alias, given) == [answer]
    other = "prepared" if state == "unknown" else answer
    row = PreparedEvent.objects.using(alias).get()
    assert row.state == other
    for change in ({"data": {"total": 31}}, {"topic": "t"}, {"stream": "order-18"}):
        assert prepare(alias, request(event_id=given.event_id, **change)) == ["conflict"]
    assert len(in_log()) == (state == "confirmed")
    assert not Incident.objects.using(alias).exists()


@pytest.mark.parametrize(
    ("wanted", "state", "answer", "then"),
    [
        ("confirmed", "unknown", "unknown", []),
        ("confirmed", "prepared", "confirmed", ["confirmed"]),
        ("confirmed", "undecided", "confirmed", ["confirmed"]),
        ("confirmed", "confirmed", "confirmed", ["confirmed"]),
        ("confirmed", "cancelled", "contradiction", ["cancelled"]),
        ("cancelled", "unknown", "cancelled", ["cancelled"]),
        ("cancelled", "prepared", "cancelled", ["cancelled"]),
        ("cancelled", "undecided", "cancelled", ["cancelled"]),
        ("cancelled", "confirmed", "contradiction", ["confirmed"]),
        ("cancelled", "cancelled", "cancelled", ["cancelled"]),
    ],
)
def test_decide(
    alias: str, wanted: str, state: str, answer: str, then: Any, states: Any, in_log: Any
) -> None:
    given = request()
    move(alias, given, state)
    for _ in range(2):  # an answer that is lost is asked for again, and changes nothing
        assert [a.state for a in decide(alias, (given.event_id, wanted))] == [answer]
    assert states() == then
    assert len(in_log()) == (then == ["confirmed"])
    incidents = Incident.objects.using(alias).filter(kind=Incident.Kind.CONTRADICTION)
    assert incidents.count() == (answer == "contradiction")
    row = PreparedEvent.objects.using(alias).first()
    assert row is None or (row.next_check_at, row.decided_by) == (None, "call")


@committing
def test_a_contradiction_sends_the_signal_of_incidents(alias: str) -> None:
    given, heard = request(), []
    move(alias, given, "cancelled")
    incident_recorded.connect(
        lambda **told: heard.append((told["using"], told["incident"])), weak=False, dispatch_uid="h"
    )
    try:
        for _ in range(2):
            decide(alias, (given.event_id, "confirmed"))
    finally:
        incident_recorded.disconnect(dispatch_uid="h")
    assert heard == [(alias, Incident.objects.using(alias).get())]


def test_a_contradiction_that_two_calls_have_recorded(alias: str) -> None:
    """At once, as nothing keeps them from it: what comes later is told the same."""
    given = request()
    move(alias, given, "cancelled")
    row = PreparedEvent.objects.using(alias).get()
    for _ in range(2):
        Incident.objects.using(alias).create(
            kind=Incident.Kind.CONTRADICTION, first_id=row.pk, last_id=row.pk
        )
    assert [a.state for a in decide(alias, (given.event_id, "confirmed"))] == ["contradiction"]
    assert Incident.objects.using(alias).count() == 2


def test_a_prepare_that_comes_after_its_cancel_is_dead(alias: str, in_log: Any) -> None:
    given = request()
    decide(alias, (given.event_id, "cancelled"))
    assert prepare(alias, given) == ["cancelled"]
    assert [a.state for a in decide(alias, (given.event_id, "confirmed"))] == ["contradiction"]
    assert in_log() == []


def test_an_id_is_its_senders_own(alias: str, in_log: Any) -> None:
    given = request()
    prepare(alias, given)
    confirm = {given.event_id: "confirmed"}
    [answer] = keeper.decide("alias:other", confirm, by=keeper.CALL, using=alias)
    assert answer.state == "unknown"
    assert in_log() == []


@committing
@pytest.mark.timeout(600 if FULL else 120)
def test_confirm_and_cancel_are_raced(alias: str, states: Any, in_log: Any, elsewhere: Any) -> None:
    """One of them wins; the other one is a contradiction, and is recorded."""
    confirmed = 0
    for _ in range(RACES):
        given, barrier = request(), threading.Barrier(2)
        prepare(alias, given)

        def decided(state: str, id: UUID = given.event_id, barrier: Any = barrier) -> str:
            barrier.wait()
            return decide(alias, (id, state))[0].state

        answers = [elsewhere(decided, state) for state in ("confirmed", "cancelled")]
        found = [answer.result() for answer in answers]
        assert found in (["confirmed", "contradiction"], ["contradiction", "cancelled"])
        confirmed += found[0] == "confirmed"
    assert states().count("confirmed") == len(in_log()) == confirmed
    assert Incident.objects.using(alias).count() == RACES


@committing
def test_confirmed_by_four_at_once(alias: str, in_log: Any, elsewhere: Any) -> None:
    given = [request(f"order-{n}") for n in range(20)]
    prepare(alias, *given)
    barrier = threading.Barrier(4)

    def confirm() -> set[str]:
        barrier.wait()
        return {a.state for a in decide(alias, *((g.event_id, "confirmed") for g in given))}

    answers = [elsewhere(confirm) for _ in range(4)]
    assert [answer.result() for answer in answers] == [{"confirmed"}] * 4
    assert len(in_log()) == 20


@committing
def test_a_receiver_that_ends_its_thread_costs_no_other_event(
    alias: str,
) -> None:
    """The thread of the check-back, or of a request, decides many events together."""
    requests = [request(f"order-{number}") for number in range(5)]
    prepare(alias, *requests)

    def refuse(events: Any, **kwargs: Any) -> None:
        if any(event.stream == "order-3" for event in events):
            raise SystemExit

    def run() -> None:
        try:
            answers.extend(decide(alias, *((each.event_id, "confirmed") for each in requests)))
        finally:
            connections.close_all()

    answers: list[Answer] = []
    events_published.connect(refuse)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        events_published.disconnect(refuse)
    assert [each.state for each in answers] == [*["confirmed"] * 3, "undecided", "confirmed"]


@committing
def test_a_row_that_was_edited_by_hand(alias: str, states: Any, in_log: Any) -> None:
    """It stays, with its reason; the others of its batch are published."""
    given = [request(f"order-{n}") for n in range(7)]
    prepare(alias, *given)
    rows = PreparedEvent.objects.using(alias)
    rows.filter(stream="order-3").update(content={"data": {"total": 99}, "metadata": {}})
    rows.filter(stream="order-5").update(log="no_such_log")
    answers = decide(alias, *((each.event_id, "confirmed") for each in given))
    assert [a.state for a in answers].count("confirmed") == 5
    assert len(in_log()) == 5
    for stream in ("order-3", "order-5"):
        row = rows.get(stream=stream)
        assert (row.state, row.next_check_at) == ("undecided", None)
        assert "edited by hand" in row.reason
    # Cancelling publishes nothing, so it is possible.
    assert [a.state for a in decide(alias, (given[3].event_id, "cancelled"))] == ["cancelled"]


@committing
def test_a_callback_that_fails_after_the_commit(alias: str, states: Any, in_log: Any) -> None:
    """The event is published, and that is what is said of it."""
    given = request()
    prepare(alias, given)

    def receive(using: str, **told: Any) -> None:
        transaction.on_commit(lambda: 1 / 0, using=using)

    events_published.connect(receive)
    try:
        answers = decide(alias, (given.event_id, "confirmed"))
    finally:
        events_published.disconnect(receive)
    assert [a.state for a in answers] == states() == ["confirmed"]
    assert len(in_log()) == 1


def test_a_message_id_that_the_log_has_already(alias: str, in_log: Any) -> None:
    """Of the same event it is the second lock; of another one it is refused, visibly."""
    same, other = request("order-1"), request("order-2")
    prepare(alias, same, other)
    with transaction.atomic(using=alias):
        publish("order-1", "order.paid", {"total": 30}, message_id=same.event_id, using=alias)
        publish("order-2", "order.lost", {"total": 30}, message_id=other.event_id, using=alias)
    answers = decide(alias, (same.event_id, "confirmed"), (other.event_id, "confirmed"))
    assert [a.state for a in answers] == ["confirmed", "undecided"]
    assert "MessageIdConflict" in PreparedEvent.objects.using(alias).get(stream="order-2").reason
    assert len(in_log()) == 2


@pytest.mark.parametrize("policy", ["confirm", "cancel"])
def test_a_policy_contradicts_nobody(alias: str, policy: str, states: Any) -> None:
    """A call that comes in the same moment has decided."""
    given = request()
    prepare(alias, given)
    state = {"confirm": "confirmed", "cancel": "cancelled"}
    first = {"confirm": "cancelled", "cancel": "confirmed"}[policy]
    decide(alias, (given.event_id, first))
    decide(alias, (given.event_id, state[policy]), by=keeper.POLICY)
    assert states() == [first]
    assert not Incident.objects.using(alias).exists()


NUMBERS = [1e16, 1e22, 1e23, 1.5e300, -0.0, 1.0, 0.1, 1e-7, 5e-324, 2**63, -(2**53) - 1, 30]
NUMBERS += [2**64, -(2**63) - 1, 10**30]


def test_numbers_that_databases_write_otherwise(alias: str, in_log: Any) -> None:
    given = [request(data={"n": n, "list": [n]}, metadata={"n": n}) for n in NUMBERS]
    for _ in range(2):
        assert prepare(alias, *given) == ["prepared"] * len(NUMBERS)
    answers = decide(alias, *((each.event_id, "confirmed") for each in given))
    assert {answer.state for answer in answers} == {"confirmed"}
    for number, (_, _, data) in zip(NUMBERS, in_log(), strict=True):
        seen, _ = canonical("n", number)
        assert repr(data) == repr({"n": seen, "list": [seen]})
    assert prepare(alias, request(event_id=given[0].event_id, data={"n": 1e16})) == ["conflict"]


def test_an_id_that_is_taken_while_the_database_is_slow(alias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(keeper, "LOCK_SECONDS", 0.001)
    given = request()
    assert [prepare(alias, given), prepare(alias, given)] == [["prepared"], ["prepared"]]


def test_large_integers_are_told_apart(alias: str) -> None:
    given = request(data={"id": 2**60 + 1})
    prepare(alias, given)
    assert prepare(alias, request(event_id=given.event_id, data={"id": 2**60})) == ["conflict"]


def test_fractions_are_told_apart(alias: str) -> None:
    given = request(data={"total": 1.5})
    prepare(alias, given)
    assert prepare(alias, request(event_id=given.event_id, data={"total": 1.25})) == ["conflict"]


@committing
@on("postgres", "mariadb")  # SQLite has one writer at a time
@pytest.mark.usefixtures("new_log")
def test_a_stream_that_another_transaction_holds(
    alias: str, states: Any, in_log: Any, elsewhere: Any, monkeypatch: Any
) -> None:
    """It holds up its own events; the others of the batch are published."""
    monkeypatch.setattr(keeper, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(keeper, "DECIDE_SECONDS", 60)
    given = [request(f"order-{n}") for n in range(4)]
    prepare(alias, *given)
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic(using=alias):
            publish("order-2", "order.seen", using=alias)
            held.set()
            go.wait(60)

    holder = elsewhere(hold)
    held.wait(60)
    decisions = [(each.event_id, "confirmed") for each in given]
    try:
        with pytest.raises(OperationalError):
            decide(alias, *decisions)
        assert states() == ["confirmed", "confirmed", "prepared", "confirmed"]
    finally:
        go.set()
        holder.result()
    assert [a.state for a in decide(alias, *decisions)] == ["confirmed"] * 4
    assert len(in_log()) == 5


@committing
@pytest.mark.parametrize("point", ["decided", "decided_committed"])
def test_state_and_event_are_one_commit(alias: str, point: str, states: Any, in_log: Any) -> None:
    """The process is killed for real in ``test_killed``."""
    given = request()
    prepare(alias, given)

    def fail() -> None:
        raise KeyboardInterrupt

    set_failpoint(point, fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            decide(alias, (given.event_id, "confirmed"))
    finally:
        set_failpoint(point, None)
    done = point == "decided_committed"
    assert (states(), len(in_log())) == (["confirmed" if done else "prepared"], int(done))
    decide(alias, (given.event_id, "confirmed"))
    assert (states(), len(in_log())) == (["confirmed"], 1)


@pytest.mark.parametrize("alias", [pytest.param("mariadb", id="mariadb")], indirect=True)
def test_more_than_a_packet_of_the_database(alias: str, states: Any, in_log: Any) -> None:
    """MySQL cuts the connection of a statement that is larger."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        count = cursor.fetchone()[0] // 250_000 + 1
    new = [checked(NewPrepared("s", "t", {"text": "x" * 250_000})) for _ in range(count)]
    answers = keeper.prepare("alias:billing", new, using=alias)
    assert [answer.state for answer in answers] == ["prepared"] * count
    wanted = dict.fromkeys([row.event_id for row in new], "confirmed")
    keeper.decide("alias:billing", wanted, by="call", using=alias)
    assert states() == ["confirmed"] * count
    assert len(in_log()) == count


def test_a_batch_with_an_id_twice(alias: str) -> None:
    given, unknown = request(), uuid4()
    prepare(alias, given)
    answers = decide(
        alias,
        (given.event_id, "confirmed"),
        (unknown, "confirmed"),
        (given.event_id, "confirmed"),
    )
    assert [a.state for a in answers] == ["confirmed", "unknown"]
    assert Event.objects.using(alias).count() == 1


def test_a_policy_decides_no_event_whose_time_was_extended(alias: str, in_log: Any) -> None:
    given = request()
    prepare(alias, given)
    assert [a.state for a in decide(alias, (given.event_id, "confirmed"), by=keeper.POLICY)] == [
        "prepared"
    ]
    assert PreparedEvent.objects.using(alias).get().state == "prepared"
    assert in_log() == []
