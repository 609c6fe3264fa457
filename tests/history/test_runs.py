"""P4: histories of workers that break it, and those that only look like it."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.history import Record, judge

from .test_judge import broken, incident, published, record, staged


def run(at: Any, outcome: str = "ok", job: str = "a", **facts: Any) -> Record:
    return record("run", at, outcome, job=job, **facts)


JOB = [staged("a", receipt=True), published("a", 1)]
LOST = run((2, None), "unknown", kept=10)

GUILTY = {
    "it was published, and nothing else": [],
    "its only run was lost": [LOST],
    "its only run was a retry": [run((2, 3), "failed")],
    "two at once": [run((2, 6)), run((4, 8))],
    "two at once, the longer one first": [run((2, 9)), run((3, 4)), run((5, 6))],
    "begun before the lease of a lost one was over": [LOST, run((9, 12))],
    "begun while a worker that lost its lease later had it": [run((2, 9), kept=6), run((5, 8))],
    "again after its end was committed": [run((2, 3), settled=4), run((5, 6))],
    "again after the end of one without its lease": [
        run((2, 9), kept=6, settled=10),
        run((11, 12)),
    ],
    "again, though it had not failed": [run((2, 3), settled=4), run((3.5, 5))],
}
INNOCENT = {
    "run once": [run((2, 3), settled=4)],
    "a lost run, and another one after its lease": [LOST, run((11, 12), settled=13)],
    "a lost run whose lease is not known": [run((2, None), "unknown"), run((3, 4))],
    "a retry": [run((2, 3), "failed"), run((3, 5), settled=6)],
    "it went on without its lease": [run((2, 9), kept=6), run((7, 8), settled=10)],
    "it ended without its lease, and the other one, too": [
        run((2, 9), kept=6, settled=10),
        run((7, 8)),
    ],
    "its worker lost the database before it could say so": [run((2, 3)), run((5, 6), settled=7)],
    "a row": [LOST, record("row", job="a")],
    "dead": [LOST, record("dead", job="a", reason="r")],
    "discarded": [record("discard", job="a")],
}


@pytest.mark.parametrize("name", GUILTY)
def test_what_breaks_the_promise(name: str) -> None:
    assert broken([*JOB, *GUILTY[name]], "P4")


@pytest.mark.parametrize("name", INNOCENT)
def test_what_only_looks_like_it(name: str) -> None:
    assert not broken([*JOB, *INNOCENT[name]], "P4")


def test_without_a_receipt_nothing_is_promised() -> None:
    assert not broken([staged("a"), published("a")], "P4")
    assert not broken([staged("a", receipt=True, transaction=1)], "P4")


def test_a_job_that_was_sent_again_for_want_of_a_receipt_is_explained() -> None:
    ended = run((6, 7), settled=8)
    sent = [staged("a", receipt=True), *(published("a", n, sender="one") for n in (1, 5)), ended]
    assert broken(sent, "P5")
    assert not broken([*sent, incident("no_receipt", 5)], "P5")
    assert broken([*sent, incident("no_receipt", 5), published("a", 6, sender="one")], "P5")


def test_lost_runs_are_counted() -> None:
    assert judge([*JOB, LOST], required=["lost run"]).missing == []
    assert judge(JOB, required=["lost run"]).missing == ["lost run"]
