"""What is a problem, and what is not. Facts are made by hand: each case is a few numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox_app.jobs.drain.status import Backlog, Held
from outbox_app.models.counting import MANY
from outbox_app.monitoring.diagnosis import Limits, problems
from outbox_app.monitoring.status import (
    DeadFacts,
    DelayFacts,
    DrainerFacts,
    Facts,
    PerMinute,
    SubscriptionFacts,
)

DRAINER = DrainerFacts(
    id="d", host="web-1", pid=7, shards=128, lease_seconds=10, silent_seconds=1, silent=False,
    published=0, dead=0, per_minute=0, trouble="",
)  # fmt: skip
SUBSCRIPTION = SubscriptionFacts(
    name="stock", state="running", declared=True, served=True, behind=0, complete=True,
    oldest_seconds=0, unread=False, handled=0, parked=0, gaps=0, error="",
)  # fmt: skip
FINE = Facts(
    database="default",
    backlog=Backlog(rows=5, oldest_seconds=12.25),
    held=Held(due=0, within_the_hour=3, later=4),
    drainers=[DRAINER],
    unowned_shards=0,
    dead=DeadFacts(jobs=2, complete=True, by_error={"E": 2}),
    incidents={},
    per_minute=PerMinute(None, 0, 0, 0, 0),
    delay=DelayFacts(None, None, None),
    subscriptions=[SUBSCRIPTION],
)
SILENT = replace(DRAINER, pid=8, silent=True)
TROUBLED = replace(DRAINER, pid=9, trouble="BrokerUnavailable: redis://secret@broker is away")
IDLE = Backlog(rows=0, oldest_seconds=0)


def told(facts, **limits):
    return [(each.code, each.text) for each in problems(facts, Limits(**limits))]


def test_work_that_waits_while_a_drainer_runs_is_none():
    assert told(FINE) == []
    assert told(replace(FINE, drainers=[SILENT, TROUBLED, DRAINER])) == []


@pytest.mark.parametrize(
    ("drainers", "code", "text"),
    [
        ([], "no_drainer", "5 jobs wait, and no drainer is running."),
        ([SILENT], "no_drainer", "5 jobs wait, and no drainer is running."),
        ([TROUBLED, SILENT], "trouble", "5 jobs wait, and every drainer is in trouble."),
    ],
)
def test_nobody_moves_what_waits(drainers, code, text):
    assert told(replace(FINE, drainers=drainers)) == [(code, text)]
    held = replace(FINE, drainers=drainers, backlog=IDLE)
    assert told(held) == []
    due = replace(held, held=Held(due=1, within_the_hour=0, later=0))
    assert told(due) == [(code, text.replace("5 jobs wait", "1 job waits"))]


def test_details_name_names_and_texts_do_not():
    [problem] = problems(replace(FINE, drainers=[TROUBLED]), Limits())
    assert problem.detail == f"web-1:9: {TROUBLED.trouble}"
    assert "secret" not in problem.text
    [problem] = problems(replace(FINE, drainers=[SILENT]), Limits())
    assert problem.detail == "Silent beyond their lease: web-1:8."


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": "failing", "error": "ValueError: secret"}, "ValueError: secret"),
        ({"state": "stopped", "served": False, "behind": 1}, "no process runs it"),
        ({"state": "stopped", "served": False, "complete": False}, "no process runs it"),
        ({"state": "waiting", "served": False, "unread": True}, "it has never run"),
    ],
)
def test_a_subscription_stands_still(changes, why):
    still = replace(SUBSCRIPTION, **changes)
    [problem] = problems(replace(FINE, subscriptions=[still, SUBSCRIPTION]), Limits())
    assert (problem.code, problem.text) == ("subscription", "1 subscription stands still.")
    assert problem.detail.startswith(f"stock: {why}")
    two = replace(FINE, subscriptions=[still, still])
    assert told(two) == [("subscription", "2 subscriptions stand still.")]


@pytest.mark.parametrize(
    "changes",
    [
        {"behind": 5000, "oldest_seconds": 900},
        {"state": "paused", "served": False, "behind": 9},
        {"state": "stopped", "served": False},
        {"state": "waiting", "served": False},
        {"state": "stopped", "served": False, "behind": 9, "declared": False},
        # Its process has just begun with it.
        {"state": "waiting", "served": True, "unread": True},
    ],
)
def test_one_that_moves_or_is_not_meant_to_is_none(changes):
    assert told(replace(FINE, subscriptions=[replace(SUBSCRIPTION, **changes)])) == []


def test_limits_are_what_is_still_fine():
    assert told(FINE, max_age=12.25, max_backlog=5, max_dead=2) == []
    assert told(FINE, max_age=12, max_backlog=4, max_dead=1) == [
        ("max_age", "The oldest ready job is 12.2 s old; the limit is 12 s."),
        ("max_backlog", "5 jobs are ready; the limit is 4."),
        ("max_dead", "2 dead jobs; the limit is 1."),
    ]
    assert told(FINE, max_age=0, max_backlog=0, max_dead=0) != []
    empty = replace(FINE, backlog=IDLE, dead=DeadFacts(jobs=0, complete=True, by_error={}))
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
