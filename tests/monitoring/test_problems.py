"""Problems and their severity. The facts are made by hand: each case is a few numbers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from outbox_app.capability import kinds
from outbox_app.events.doors import EventsSection
from outbox_app.events.sink import SinkStatus
from outbox_app.events.subscriptions.lag import SubscriptionLag
from outbox_app.jobs.dead_summary import DeadMatrix, DeadRow
from outbox_app.jobs.drain.status import Backlog, DrainerStatus, Held
from outbox_app.models import Process
from outbox_app.models.counting import MANY
from outbox_app.monitoring.diagnosis import Limits, is_healthy, problems
from outbox_app.monitoring.long_transactions import LongTransaction, LongTransactions
from outbox_app.monitoring.status import OutboxStatus


def drainer(pid, *, owned=(), silent=1, trouble=""):
    row = Process(host="web-1", pid=pid, lease_seconds=10, trouble=trouble)
    return DrainerStatus(row, list(owned), silent)


def subscription(**changes):
    values = {"state": "running", "declared": True, "served": True, **changes}
    return SubscriptionLag("stock", **values)


DRAINER = drainer(7, owned=range(128))
SUBSCRIPTION = subscription()
FINE = OutboxStatus(
    database="default",
    backlog=Backlog(rows=5, oldest_seconds=12.25),
    held=Held(due=0, within_the_hour=3, later=4),
    drainers=[DRAINER],
    dead=DeadMatrix([DeadRow("t", (0,), 2)], [DeadRow("E", (0,), 2)], 2, True),
    sections={"events": EventsSection(subscriptions=[SUBSCRIPTION])},
)
SILENT = drainer(8, silent=11)
TROUBLED = drainer(9, trouble="BrokerUnavailable: redis://secret@broker is away")
IDLE = Backlog(rows=0, oldest_seconds=0)


def with_events(**facts):
    return replace(FINE, sections={"events": EventsSection(**facts)})


def told(facts, severity="bad", **limits):
    found = problems(facts, Limits(**limits))
    assert is_healthy(found) == all(each.severity == "warning" for each in found)
    return [(each.code, each.text) for each in found if each.severity == severity]


def warned(facts, **limits):
    return told(facts, "warning", **limits)


def test_work_that_waits_while_a_drainer_runs_is_none():
    assert told(FINE) == warned(FINE) == []
    some = replace(FINE, drainers=[SILENT, TROUBLED, DRAINER])
    assert told(some) == []
    assert [code for code, _ in warned(some)] == ["drainer_silent", "drainer_trouble"]


@pytest.mark.parametrize(
    ("drainers", "code", "text"),
    [
        ([], "no_drainer", "5 jobs are waiting and no drainer is running."),
        ([SILENT], "no_drainer", "5 jobs are waiting and no drainer is running."),
        ([TROUBLED, SILENT], "trouble", "5 jobs are waiting and every drainer is in trouble."),
    ],
)
def test_nobody_moves_what_waits(drainers, code, text):
    assert told(replace(FINE, drainers=drainers)) == [(code, text)]
    held = replace(FINE, drainers=drainers, backlog=IDLE)
    idle = [("no_drainer", "No drainer is running.")] if code == "no_drainer" else []
    assert [each for each in told(held) if each[0] != "unowned_shards"] == idle
    due = replace(held, held=Held(due=1, within_the_hour=0, later=0))
    assert told(due) == [(code, text.replace("5 jobs are waiting", "1 job is waiting"))]


def test_a_project_that_stages_nothing_needs_no_drainer():
    nothing = replace(FINE, drainers=[], backlog=IDLE, held=Held(0, 0, 0), stages=False)
    assert told(nothing) == warned(nothing) == []
    assert told(replace(nothing, stages=True)) == [("no_drainer", "No drainer is running.")]


def test_a_command_names_the_database_that_it_would_not_look_at():
    [problem] = problems(replace(FINE, drainers=[]))
    assert problem.action == "Start manage.py drain_outbox."
    [problem] = problems(replace(FINE, drainers=[], database="billing"))
    assert problem.action == "Start manage.py drain_outbox --database billing."


def test_shards_without_an_owner():
    owned = drainer(7, owned=range(120))
    text = "8 shards have no owner: their jobs do not leave until a drainer takes them."
    assert told(replace(FINE, drainers=[owned])) == [("unowned_shards", text)]


@pytest.mark.parametrize(
    ("source", "severity", "code"),
    [
        ("", "bad", "not_leaving"),
        ("a process that delivers immediately", "bad", "not_leaving"),
        (str(FINE.drainers[0].drainer.pk), "warning", "late"),
    ],
)
def test_jobs_that_are_late(source, severity, code):
    rates = {source: 5.0} if source else {}
    late = replace(FINE, backlog=Backlog(rows=5, oldest_seconds=420), rates=rates)
    assert told(late, severity) == [(code, "5 jobs are ready, the oldest for 7 min.")]
    assert warned(late, max_age=500) == []
    assert warned(replace(late, drainers=[])) == []


@pytest.mark.parametrize(("minutes", "code"), [(0.5, "late"), (2, "not_leaving")])
def test_a_new_drainer_publishes_before_it_writes_a_rate(minutes, code):
    started = datetime(2026, 1, 1, tzinfo=UTC)
    row = Process(pid=7, done=3, started_at=started, lease_seconds=10,
                  heartbeat_at=started + timedelta(minutes=minutes))  # fmt: skip
    new = DrainerStatus(row, list(range(128)), 1)
    late = replace(FINE, drainers=[new], backlog=Backlog(rows=5, oldest_seconds=420))
    assert [each.code for each in problems(late)] == [code]


def test_details_name_names_and_texts_do_not():
    [problem] = problems(replace(FINE, drainers=[TROUBLED]), Limits())
    assert problem.detail == f"web-1:9: {TROUBLED.drainer.trouble}"
    assert "secret" not in problem.text
    [problem] = problems(replace(FINE, drainers=[SILENT]))
    assert problem.detail == "web-1:8: silent beyond its lease"


def test_details_name_each_error_once():
    other = drainer(10, trouble=TROUBLED.drainer.trouble)
    third = drainer(11, trouble="OSError: full")
    [problem] = problems(replace(FINE, drainers=[TROUBLED, third, other]))
    names = f"web-1:9, web-1:10: {TROUBLED.drainer.trouble}"
    assert problem.detail == f"{names}; web-1:11: OSError: full"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "stopped", "served": False, "behind": 1}, "no process runs it"),
        ({"state": "stopped", "served": False, "complete": False}, "no process runs it"),
        ({"state": "waiting", "served": False, "unread": True}, "it has never run"),
    ],
)
def test_a_subscription_stands_still(changes, why):
    still = subscription(**changes)
    [problem] = problems(with_events(subscriptions=[still, SUBSCRIPTION]), Limits())
    assert (problem.code, problem.text) == ("subscription", "1 subscription is stopped.")
    assert problem.detail.startswith(f"stock: {why}")
    two = with_events(subscriptions=[still, still])
    assert told(two) == [("subscription", "2 subscriptions are stopped.")]


def test_one_that_fails_has_the_word_of_its_list():
    failing = subscription(state="failing", error="ValueError: secret")
    [problem] = problems(with_events(subscriptions=[failing, SUBSCRIPTION]))
    assert (problem.code, problem.text) == ("failing", "1 subscription is failing.")
    assert problem.detail == "stock: ValueError: secret"


@pytest.mark.parametrize(
    "changes",
    [
        {"behind": 5000, "oldest_seconds": 900},
        {"state": "paused", "served": False, "behind": 9},
        {"state": "stopped", "served": False},
        {"state": "waiting", "served": False},
        {"state": "undeclared", "served": False, "behind": 9, "declared": False},
        # Its process has just begun with it.
        {"state": "waiting", "served": True, "unread": True},
    ],
)
def test_one_that_moves_or_is_not_meant_to_is_none(changes):
    assert told(with_events(subscriptions=[subscription(**changes)])) == []


def test_what_a_person_should_know_of_subscriptions():
    paused = subscription(state="paused", behind=9)
    parked = subscription(parked=2, gaps=1)
    found = problems(with_events(subscriptions=[paused, parked, SUBSCRIPTION]))
    assert [(each.text, each.detail) for each in found] == [
        ("1 subscription is paused, and behind.", "stock: 9 events behind"),
        ("2 streams are parked.", "stock: 2 parked, open gaps: 1"),
    ]
    assert is_healthy(found)


def test_one_that_the_code_no_longer_declares_is_one_warning_with_its_cure():
    """Neither its error nor its parked streams are a problem of their own: no process reads it."""
    gone = subscription(state="undeclared", declared=False, served=False, behind=3008, parked=2,
                        error="ValueError: no")  # fmt: skip
    [problem] = problems(with_events(subscriptions=[gone, SUBSCRIPTION]))
    assert (problem.code, problem.severity) == ("undeclared", "warning")
    assert problem.text == "1 subscription is not declared, and no process runs it."
    assert problem.detail == "stock: 3008 events behind"
    assert "outbox_subscriptions forget" in problem.action


def test_jobs_that_died_lately_are_told_where_no_limit_says_how_many_may():
    dead = DeadMatrix([], [], 9, False, lately=3)
    assert warned(replace(FINE, dead=dead)) == [("dead", "3 jobs have died in the last hour.")]
    assert warned(replace(FINE, dead=dead), max_dead=9) == []


def test_gaps_and_old_transactions():
    def holders(seconds):
        return LongTransactions([LongTransaction("1", False, "u", seconds, "idle", "")])

    old = replace(
        FINE,
        sections={"events": EventsSection(gaps=MANY + 1)},
        in_flight={"outbox_stagedjob": holders(59), "outbox_event": holders(200)},
        snapshots=holders(3600),
    )
    assert warned(old) == [
        ("gaps", f"{MANY}+ gaps are open."),
        ("transaction", "A transaction that writes has been open for 3 min."),
        ("snapshot", "A transaction has been open for 1 h 0 min: it keeps deleted rows in the "
                     "tables."),
    ]  # fmt: skip


def test_a_log_that_does_not_sink():
    sunk = SinkStatus("outbox_event", "/srv", 9, 1, 10 * 86400, 86400.0, "the archive")
    early, fast = replace(sunk, behind_seconds=3599.0), replace(sunk, waits_for="")
    assert warned(with_events(sinks=[early, fast])) == []
    [problem] = problems(with_events(sinks=[early, sunk]), Limits())
    assert (problem.text, problem.detail) == ("1 log does not sink.", "outbox_event: the archive")


def test_every_code_has_its_texts():
    for kind in kinds().values():
        assert kind.severity in ("bad", "warning")
        assert str(kind.action).endswith(".")
        assert kind.text % {"n": 1, "count": "1", "age": "1 s", "limit": 1}


def test_the_order_of_problems_does_not_depend_on_the_order_of_apps():
    ranks = [kind.rank for kind in kinds().values()]
    assert ranks == sorted(set(ranks))


def test_limits_are_what_is_still_fine():
    assert told(FINE, max_age=12.25, max_backlog=5, max_dead=2) == []
    assert told(FINE, max_age=12, max_backlog=4, max_dead=1) == [
        ("max_age", "The oldest ready job is 12.2 s old; the limit is 12 s."),
        ("max_backlog", "5 jobs are ready; the limit is 4."),
        ("max_dead", "2 dead jobs; the limit is 1."),
    ]
    due = replace(FINE, held=Held(due=1, within_the_hour=0, later=0))
    assert told(due, max_backlog=5) == [("max_backlog", "6 jobs are ready; the limit is 5.")]
    assert told(FINE, max_age=0, max_backlog=0, max_dead=0) != []
    empty = replace(FINE, backlog=IDLE, dead=DeadMatrix([], [], 0, True))
    assert told(empty, max_age=0, max_backlog=0, max_dead=0) == []


def test_a_count_that_was_cut_is_beyond_every_limit():
    many = replace(FINE, backlog=Backlog(rows=MANY + 1, oldest_seconds=1))
    assert told(many, max_backlog=MANY) == [
        ("max_backlog", f"{MANY}+ jobs are ready; the limit is {MANY}.")
    ]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_age": -1},
        {"max_age": float("nan")},
        {"max_age": float("inf")},
        {"max_backlog": MANY + 1},
        {"max_dead": -1},
        {"max_dead": MANY + 1},
    ],
)
def test_a_limit_that_nothing_could_pass_is_refused(limits):
    [name] = limits
    with pytest.raises(ValueError, match=name):
        Limits(**limits)
