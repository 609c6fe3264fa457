"""The judge finds each broken promise, and nothing in a history that only looks like it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from outbox_app.history import PROMISES, Record, judge
from outbox_app.history.rules import LATE


def record(what: str, at: Any = None, outcome: str = "ok", **facts: Any) -> Record:
    """``at``: when it began and ended, or one time for both."""
    began, ended = at if isinstance(at, tuple) else (at, at)
    return Record(what, facts, began=began, ended=ended, outcome=outcome)


def staged(job: str, at: Any = None, *, row: int = 1, shard: int = 0, **facts: Any) -> Record:
    return record("stage", at, job=job, row=row, shard=shard, **facts)


def published(job: str, at: Any = None, **facts: Any) -> Record:
    return record("publish", at, job=job, **facts)


def incident(kind: str = "takeover", at: Any = None, **facts: Any) -> Record:
    return record("incident", at, **{"kind": kind, "shards": [0], "first": 1, "last": 9, **facts})


def event(position: int, at: Any = None, stream: str = "s", **facts: Any) -> Record:
    return record("event", at, **{"position": position, "stream": stream, **facts})


def handled(*positions: int, by: str = "shop", **facts: Any) -> list[Record]:
    return [record("handle", subscription=by, position=each, **facts) for each in positions]


def command(id: str, at: Any = None, outcome: str = "ok", **facts: Any) -> Record:
    return record("command", at, outcome, **{"entity": "e", "id": id, **facts})


def version(number: int, id: str | None) -> Record:
    return record("version", entity="e", version=number, command=id)


def broken(records: Iterable[Record], promise: str, **options: Any) -> list[str]:
    """Return what is found; no other promise must be broken."""
    but = [name for name in PROMISES if name != "P6" or promise == "P6"]
    found = judge(records, promises=but, **options).findings
    assert set(found) <= {promise}
    return found.get(promise, [])


SENT = [staged("a"), published("a")]


def test_what_a_transaction_left_is_what_its_process_has_heard() -> None:
    committed = record("commit", transaction=1)
    assert broken([record("transaction", id=1)], "P1")
    assert broken([record("transaction", outcome="failed", id=1), committed], "P1")
    assert not broken([record("transaction", id=1), committed], "P1")
    assert not broken([record("transaction", outcome="failed", id=1)], "P1")
    begun = record("transaction", outcome="unknown", id=1)
    for more in ([], [committed]):
        assert not broken([begun, *more], "P1")
    # The later record counts.
    assert broken([begun, record("transaction", id=1)], "P1")


def test_a_row_belongs_to_a_committed_job() -> None:
    row, dead = record("row", job="a"), record("dead", job="a", reason="r")
    inside = staged("a", transaction=1)
    assert broken([inside, row], "P1")
    assert broken([inside, dead], "P1")
    assert not broken([inside, record("commit", transaction=1), row], "P1")
    assert broken([staged("a"), row, row], "P1")
    assert broken([staged("a"), record("undo", job="a"), row], "P1")


def test_a_job_is_published_after_its_commit_only() -> None:
    inside = staged("a", 1, transaction=1)
    assert broken([inside, published("a", 2)], "P2")
    assert broken([published("a")], "P2")
    assert broken([inside, record("commit", (3, 4), transaction=1), published("a", 2)], "P2")
    # The broker had it before the process heard of its commit, but not before it was asked.
    assert not broken([inside, record("commit", (1, 4), transaction=1), published("a", 2)], "P2")
    assert not broken(
        [
            inside,
            published(
                "a",
                2,
            ),
            record("commit", transaction=1),
        ],
        "P2",
    )


def test_a_committed_job_is_published_or_in_sight() -> None:
    dead = record("dead", job="a", reason="r")
    assert broken([staged("a")], "P3")
    assert broken([staged("a"), record("publish", outcome="unknown", job="a")], "P3")
    assert broken([staged("a"), record("dead", job="a", reason="")], "P3")
    assert broken([staged("a"), dead, record("row", job="a")], "P3")
    for sight in (published("a"), dead, record("row", job="a"), record("discard", job="a")):
        assert not broken([staged("a"), sight], "P3")
    assert not broken([staged("a", transaction=1)], "P3")
    assert not broken([staged("a"), record("undo", job="a")], "P3")


def test_an_extra_publish_has_an_incident() -> None:
    twice = [staged("a", row=5), published("a", 1), published("a", 2)]
    assert broken(twice, "P5")
    assert not broken([*twice, incident(at=1.5)], "P5")
    for other in (
        incident(at=1.5, shards=[1]),
        incident(at=1.5, first=6),
        incident(at=1.5, last=4),
        incident(at=2 + LATE + 1),
    ):
        assert broken([*twice, other], "P5")
    assert not broken([*twice, incident(at=2 + LATE)], "P5")


def test_an_incident_explains_no_more_than_it_can() -> None:
    often = [staged("a"), *(published("a", n) for n in range(4)), incident(at=1)]
    assert broken(often, "P5", sends_of_an_attempt=1)
    assert broken(often, "P5", sends_of_an_attempt=2)
    requeued = incident("requeue", 1)
    assert not broken([*often, requeued], "P5", sends_of_an_attempt=2)
    assert broken([*often, requeued, published("a", 5)], "P5", sends_of_an_attempt=2)


def test_who_sent_it_twice_is_to_blame() -> None:
    def sent(*senders: str) -> list[Record]:
        return [staged("a"), *(published("a", 1, sender=each) for each in senders)]

    one, two = incident(at=1, drainer="one"), incident(at=1, drainer="two")
    assert broken(sent("one", "two"), "P5")
    assert not broken([*sent("one", "two"), one], "P5")
    assert broken([*sent("one", "two", "three"), one], "P5")
    assert not broken([*sent("one", "two", "three"), one, two], "P5")
    # It sent the job twice by itself, and a takeover explains only that another one did.
    assert broken([*sent("one", "one"), two], "P5")
    unheard = incident("unknown", 1, drainer="one")
    assert not broken([*sent("one", "one"), unheard], "P5")
    # The process that committed: an incident of its own names no drainer.
    assert broken([*sent("", "one"), one], "P5")
    assert not broken([*sent("", "one"), incident("unknown", 1)], "P5")


def test_an_effect_happens_once() -> None:
    done = record("execute", job="a")
    assert not broken([*SENT, done], "P6")
    assert broken([*SENT, done, done], "P6")
    assert broken(SENT, "P6")
    assert broken([record("execute", job="b"), *SENT, done], "P6")
    assert not broken([*SENT, record("execute", outcome="failed", job="a"), done], "P6")


@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_jobs_of_a_key_leave_in_their_order(is_ordered: bool) -> None:
    def jobs(**more: Any) -> list[Record]:
        if is_ordered:  # known by a lock
            return [staged(n, row=r, key="k", order=r, **more) for r, n in enumerate("ab", 1)]
        commits = [record("commit", (n, n), transaction=n) for n in (2, 4)]
        both = [
            staged(n, r, row=r, key="k", transaction=r + 1, **more)
            for r, n in zip((1, 3), "ab", strict=True)
        ]
        return [*both, *commits]

    turned = [published("b", 6), published("a", 7)]
    assert broken([*jobs(), *turned], "P7")
    assert not broken([*jobs(), published("b", 7), published("a", 6)], "P7")
    assert broken([*jobs(), turned[0], record("row", job="a")], "P7")
    assert not broken([*jobs(), turned[1], record("row", job="b")], "P7")
    assert not broken([*jobs(apart=True), *turned], "P7")
    assert not broken([*jobs(), turned[0], record("dead", job="a", reason="r")], "P7")
    # A later copy of an earlier job comes late.
    again = [published("a", 6), published("b", 7), published("a", 8)]
    assert not broken([*jobs(), *again, incident(at=6)], "P7")


def test_jobs_that_were_staged_side_by_side_have_no_order() -> None:
    both = [staged(n, n_, key="k", transaction=n_) for n_, n in enumerate("ab", 1)]
    commits = [record("commit", (5, 5), transaction=n) for n in (1, 2)]
    turned = [published("b", 6), published("a", 7)]
    assert not broken([*both, *commits, *turned], "P7")
    one = [staged(n, n_, key="k", transaction=1) for n_, n in enumerate("ab", 1)]
    assert broken([*one, *commits, *turned], "P7")


def test_a_subscription_handles_each_event_once() -> None:
    log = [event(1, version=1), event(2, stream="t", version=1), event(3, version=2)]
    assert not broken([*log, *handled(1, 2, 3)], "P8")
    assert not broken([*log, *handled(2, 1, 3)], "P8")
    assert broken([*log, *handled(1, 2)], "P8")
    assert broken([*log, *handled(1, 2, 3, 3)], "P8")
    assert broken([*log, *handled(1, 2, 3, 4)], "P8")
    assert broken([*log, *handled(3, 2, 1)], "P8")
    # An event of a transaction that rolled back.
    assert broken([*log, event(4, version=3, transaction=1), *handled(1, 2, 3, 4)], "P8")
    assert not broken([*log, event(4, version=3, transaction=1), *handled(1, 2, 3)], "P8")


def test_what_could_be_seen_comes_first() -> None:
    log = [event(1, (3, 4), version=1), event(2, (1, 2), stream="t", version=1)]
    assert broken([*log, *handled(1, 2)], "P8")
    assert not broken([*log, *handled(2, 1)], "P8")
    several = record("subscription", name="shop", partitions=2)
    assert not broken([several, *log, *handled(1, 2)], "P8")
    side_by_side = [event(1, (1, 4), version=1), event(2, (2, 3), stream="t", version=1)]
    assert not broken([*side_by_side, *handled(1, 2)], "P8")


def test_a_command_is_executed_once() -> None:
    assert broken([version(1, "c"), version(2, "c")], "P9")
    assert not broken([version(1, "c"), version(2, "d"), version(3, None), version(4, None)], "P9")
    told = command("c", version=1, answer=[1])
    assert not broken([told, told, version(1, "c")], "P9")
    assert broken([told, version(2, "c")], "P9")
    assert broken([told], "P9")
    assert broken([told, command("c", version=1, answer=[2]), version(1, "c")], "P9")
    for more in ([], [version(1, "c")]):
        assert not broken([command("c", outcome="unknown"), *more], "P9")


def test_of_two_commands_that_expect_one_version_one_succeeds() -> None:
    versions = [version(2, "c"), version(3, "d")]
    first = command("c", version=2, expected=1)
    assert broken([first, command("d", version=3, expected=1), *versions], "P9")
    assert not broken([first, command("d", version=3, expected=2), *versions], "P9")
    rejected = command("d", version=3, expected=2, rejected=True)
    assert not broken([first, rejected, *versions], "P9")
    assert not broken([first, command("d", outcome="failed", expected=1), *versions[:1]], "P9")


def test_a_command_comes_after_those_that_had_ended() -> None:
    versions = [version(1, "c"), version(2, "d")]
    late = [command("c", (3, 4), version=1), command("d", (1, 2), version=2)]
    assert broken([*late, *versions], "P9")
    side_by_side = [command("c", (1, 4), version=1), command("d", (2, 3), version=2)]
    assert not broken([*side_by_side, *versions], "P9")


def test_a_command_that_raises_has_no_effect() -> None:
    failed = command("c", outcome="failed")
    assert broken([failed, version(1, "c")], "P12")
    assert not broken([failed, version(1, "d")], "P12")
    assert not broken([failed, command("c", version=1), version(1, "c")], "P12")


def test_a_prepared_event_is_published_if_its_sender_has_committed() -> None:
    prepared, commit = record("prepare", event="p", transaction=1), record("commit", transaction=1)
    out = record("published", event="p")
    assert not broken([prepared, commit, out], "P10")
    assert not broken([prepared], "P10")
    assert not broken([prepared, commit, record("undecided", event="p")], "P10")
    assert broken([prepared, commit], "P10")
    assert broken([prepared, out], "P10")
    assert broken([prepared, commit, out, out], "P10")
    assert broken([out], "P10")


def test_confirm_and_cancel_exclude_each_other() -> None:
    def decided(wanted: str, outcome: str = "ok") -> Record:
        return record("decide", outcome=outcome, event="p", wanted=wanted)

    assert broken([decided("confirmed"), decided("cancelled")], "P10")
    assert not broken([decided("confirmed"), decided("confirmed")], "P10")
    assert not broken([decided("confirmed"), decided("cancelled", "failed")], "P10")


def test_ids_differ() -> None:
    assert broken([record("id", id=1), record("id", id=1)], "P13")
    assert not broken([record("id", id=1), record("id", id=2)], "P13")


def test_hard_things_are_counted_and_a_run_without_them_is_too_easy() -> None:
    log = [event(1, version=1), event(2, stream="t", version=1)]
    history = [
        *(staged("a"), published("a", sender="1"), published("a", sender="2")),
        *(incident(drainer="1"), record("happening", name="fork"), *log, *handled(2, 1)),
        record("transaction", outcome="unknown", id=1),
        record("transaction", outcome="failed", id=2),
    ]
    verdict = judge(history, promises=["P5", "P8"], required=["fork", "takeover", "repartition"])
    assert verdict.holds
    assert verdict.is_too_easy
    assert verdict.missing == ["repartition"]
    assert verdict.happened == {
        **{"fork": 1, "takeover": 1, "unknown outcome": 1, "rollback": 1, "extra publish": 1},
        "late commit below a cursor": 1,
    }
    several = [record("subscription", name="shop", partitions=2), *log, *handled(2, 1)]
    assert "late commit below a cursor" not in judge(several, promises=["P8"]).happened
    many = [record("happening", name="kill", count=3), record("happening", name="kill")]
    assert judge(many).happened == {"kill": 4}
    assert not judge([], required=[]).is_too_easy


def test_only_the_promises_that_were_asked_for_are_judged() -> None:
    history = [staged("a"), record("id", id=1), record("id", id=1)]
    assert set(judge(history).findings) == {"P3", "P13"}
    assert set(judge(history, promises=["P3"]).findings) == {"P3"}
    with pytest.raises(ValueError, match="'P11' is none of the promises P1"):
        judge(history, promises=["P11"])
