"""The soak can fail: its judge finds lost, leaked, doubled, unexplained and inverted jobs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.soak.judge import LATE, VERDICTS, Arrival, Books, Recorded, Row, Verdict, judge

ROWS = [Row(n, f"job-{n}", id=100 + n, shard=n, key="key" if n < 3 else "") for n in range(5)]
#: All is well: each job was accepted once, the last one twice, which a takeover explains.
GOOD = Books(
    rows=ROWS,
    arrivals=[*(Arrival(row.task_id, 10.0 + row.number) for row in ROWS), Arrival("job-4", 20.0)],
    incidents=[Recorded("takeover", frozenset({4}), 104, 110, at=18.0)],
    executed=[row.task_id for row in ROWS],
    events={1: ("a", 1), 2: ("b", 1), 3: ("a", 2)},
    handled={"shop": [2, 1, 3]},
    committed=["one", "two"],
    heard_committed=["one"],
    heard_rolled_back=["three"],
)


def counts(verdict: Verdict) -> dict[str, int]:
    return {name: verdict.count(name) for name in VERDICTS if verdict.count(name)}


def without(task_id: str) -> list[Arrival]:
    return [arrival for arrival in GOOD.arrivals if arrival.task_id != task_id]


def test_nothing_is_found_where_all_is_well() -> None:
    verdict = judge(GOOD)
    assert verdict.holds
    assert counts(verdict) == {}
    assert verdict.explained == 1


def test_a_job_that_was_lost() -> None:
    lost = replace(GOOD, arrivals=without("job-3"), executed=["job-0", "job-1", "job-2", "job-4"])
    assert counts(judge(lost)) == {"lost": 1}
    assert judge(replace(lost, dead={"job-3": "its reason"})).holds
    assert counts(judge(replace(lost, dead={"job-3": ""}))) == {"lost": 1}
    assert counts(judge(replace(GOOD, executed=lost.executed))) == {"lost": 1}


def test_a_job_that_leaked() -> None:
    stranger = replace(GOOD, arrivals=[*GOOD.arrivals, Arrival("rolled-back", 30.0)])
    assert counts(judge(stranger)) == {"leaked": 1}
    assert counts(judge(replace(GOOD, executed=[*GOOD.executed, "rolled-back"]))) == {"leaked": 1}


def test_a_duplicate_without_an_incident() -> None:
    for incident in (
        Recorded("takeover", frozenset({3}), 104, 110, at=18.0),  # of another shard
        Recorded("takeover", frozenset({4}), 100, 103, at=18.0),  # of other ids
        Recorded("takeover", frozenset({4}), 104, 110, at=20.0 + LATE + 1),  # of another time
    ):
        verdict = judge(replace(GOOD, incidents=[incident]))
        assert counts(verdict) == {"unexplained": 1}
        assert verdict.explained == 0


def test_an_incident_explains_no_more_than_it_can() -> None:
    often = replace(GOOD, arrivals=[*GOOD.arrivals, *[Arrival("job-4", 21.0)] * 3])
    assert counts(judge(often)) == {"unexplained": 2}
    assert counts(judge(replace(often, sends_of_an_attempt=1))) == {"unexplained": 3}
    requeued = Recorded("requeue", frozenset({4}), 104, 104, at=19.0)
    assert counts(judge(replace(often, incidents=[*GOOD.incidents, requeued]))) == {
        "unexplained": 1
    }


def test_jobs_of_a_key_that_were_accepted_in_another_order() -> None:
    turned = list(GOOD.arrivals)
    turned[0], turned[1] = turned[1], turned[0]
    assert counts(judge(replace(GOOD, arrivals=turned))) == {"out_of_order": 1}
    # A later copy is no inversion, and a key of which a job is dead has no order to keep.
    again = [*GOOD.arrivals, Arrival("job-0", 21.0)]
    taken_over = Recorded("takeover", frozenset({0, 4}), 100, 110, at=18.0)
    assert judge(replace(GOOD, arrivals=again, incidents=[taken_over])).holds
    assert judge(replace(GOOD, arrivals=turned, dead={"job-2": "refused"})).holds


def test_events_that_a_subscription_missed_repeated_or_turned_round() -> None:
    for positions, found in {
        (1, 2): {"lost": 1},
        (1, 2, 3, 3): {"doubled": 1},
        (3, 2, 1): {"out_of_order": 1},
        (1, 2, 3, 4): {"leaked": 1},
    }.items():
        assert counts(judge(replace(GOOD, handled={"shop": positions}))) == found


def test_effects_of_a_job_that_happened_twice() -> None:
    assert counts(judge(replace(GOOD, executed=[*GOOD.executed, "job-1"]))) == {"doubled": 1}


def test_transactions_that_ended_otherwise_than_their_writer_heard() -> None:
    assert counts(judge(replace(GOOD, committed=["two"]))) == {"lost": 1}
    assert counts(judge(replace(GOOD, committed=["one", "two", "three"]))) == {"leaked": 1}
