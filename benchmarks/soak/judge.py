"""The judge: compares everything that was committed with what was accepted, handled and executed.

``judge`` gets the complete books of a run, and no database. A committed job is ``lost`` if it is
neither accepted nor dead, or accepted without an effect; an event, if a subscription has not
handled it. ``leaked``: accepted, handled or executed, but not committed. ``doubled``: an effect
happened twice (promises P6 and P8). ``unexplained``: a publish beyond the first that no recorded
incident allows (P5). ``out_of_order``: a job first accepted against the order of staging in its key
(P7), or an event handled against the order of versions in its stream (P8).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Seconds within which the incident of an extra publish must be recorded: a frozen drainer writes
#: it when it continues, and a drainer without a database when the database is back.
LATE = 60.0
VERDICTS = ("lost", "leaked", "doubled", "unexplained", "out_of_order")


class Row(NamedTuple):
    """A committed row of the outbox. ``number`` increases in the order of staging."""

    number: int
    task_id: str
    id: int
    shard: int
    key: str = ""


class Arrival(NamedTuple):
    """A message that the broker has accepted."""

    task_id: str
    at: float


class Recorded(NamedTuple):
    """The part of an incident that promise P5 needs."""

    kind: str
    shards: frozenset[int]
    first_id: int
    last_id: int
    at: float

    def concerns(self, row: Row) -> bool:
        """Return whether the incident covers this row."""
        return self.first_id <= row.id <= self.last_id and row.shard in self.shards


@dataclass
class Books:
    """The records of a run."""

    rows: Collection[Row] = ()
    #: In the order in which the broker accepted them.
    arrivals: Collection[Arrival] = ()
    incidents: Collection[Recorded] = ()
    #: Task ids that are dead, with the reason.
    dead: Mapping[str, str] = field(default_factory=dict)
    #: Task ids in the order of their effects.
    executed: Collection[str] = ()
    #: Stream and version of each committed event, by position.
    events: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    #: Positions in the order of their effects, by subscription.
    handled: Mapping[str, Collection[int]] = field(default_factory=dict)
    #: Transactions in the database, and those that the writers know as committed or rolled back.
    committed: Collection[str] = ()
    heard_committed: Collection[str] = ()
    heard_rolled_back: Collection[str] = ()
    #: How often one attempt may publish a job: twice if a batch is one pipeline. If the broker
    #: refuses one of its commands, the drainer sends the batch's jobs again one by one.
    sends_of_an_attempt: int = 2


@dataclass
class Verdict:
    """The findings, a line of text for each, and the number of explained extra publishes."""

    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: int = 0

    def count(self, name: str) -> int:
        """Return how often one of VERDICTS was found."""
        return len(self.findings.get(name, ()))

    @property
    def holds(self) -> bool:
        """Whether there are no findings."""
        return not any(self.findings.values())


def judge(books: Books) -> Verdict:
    """Return the findings in the books of a run."""
    verdict = Verdict()
    _judge_transactions(books, verdict)
    _judge_jobs(books, verdict)
    _judge_order(books, verdict)
    for name, positions in books.handled.items():
        _judge_subscription(name, list(positions), books.events, verdict)
    return verdict


def _judge_transactions(books: Books, verdict: Verdict) -> None:
    committed = set(books.committed)
    for number in set(books.heard_committed) - committed:
        verdict.findings["lost"].append(f"transaction {number} was committed, and is not there")
    for number in set(books.heard_rolled_back) & committed:
        verdict.findings["leaked"].append(f"transaction {number} was rolled back, and is there")


def _judge_jobs(books: Books, verdict: Verdict) -> None:
    found = verdict.findings
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in books.rows:
        rows[row.task_id].append(row)
    sent: dict[str, list[float]] = defaultdict(list)
    for arrival in books.arrivals:
        sent[arrival.task_id].append(arrival.at)
    executed = Counter(books.executed)
    for task_id, times in sent.items():
        if task_id not in rows:
            found["leaked"].append(f"job {task_id} was accepted, and is not committed")
            continue
        allowed = 1 + _allowed(rows[task_id], times[-1], books) if len(times) > 1 else 1
        verdict.explained += min(len(times), allowed) - 1
        for _ in range(len(times) - allowed):
            found["unexplained"].append(
                f"job {task_id} {rows[task_id]} was accepted {len(times)} times, at {times}; its "
                f"incidents allow {allowed}"
            )
        if not executed[task_id]:
            found["lost"].append(f"job {task_id} was accepted, and has no effect")
    for task_id in rows.keys() - sent.keys() - books.dead.keys():
        found["lost"].append(f"job {task_id} {rows[task_id]} is neither accepted nor dead")
    for task_id, reason in books.dead.items():
        if not reason:
            found["lost"].append(f"job {task_id} is dead without a reason")
    for task_id, count in executed.items():
        if task_id not in rows:
            found["leaked"].append(f"job {task_id} was executed, and is not committed")
        for _ in range(count - 1):
            found["doubled"].append(f"job {task_id} has had its effect {count} times")


def _allowed(rows: Iterable[Row], last: float, books: Books) -> int:
    """Return how many extra publishes of a job the recorded incidents allow."""
    causes = [
        incident
        for incident in books.incidents
        if incident.at <= last + LATE and any(incident.concerns(row) for row in rows)
    ]
    requeued = sum(incident.kind == "requeue" for incident in causes)
    others = len(causes) - requeued
    # Each incident, except a requeue, allows as many publishes as one attempt can make.
    return requeued + others * books.sends_of_an_attempt


def _judge_order(books: Books, verdict: Verdict) -> None:
    first: dict[str, int] = {}
    for place, arrival in enumerate(books.arrivals):
        first.setdefault(arrival.task_id, place)
    count = Counter(row.task_id for row in books.rows)
    keys: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(books.rows):
        if row.key and row.task_id in first:
            keys[row.key].append(row)
    for key, rows in keys.items():
        if any(count[row.task_id] > 1 or row.task_id in books.dead for row in rows):
            continue  # a job of this key was requeued or refused, so its order is not promised
        latest = rows[0]
        for row in rows[1:]:
            if first[row.task_id] < first[latest.task_id]:
                verdict.findings["out_of_order"].append(
                    f"key {key}: {row} was accepted before {latest}"
                )
            else:
                latest = row


def _judge_subscription(
    name: str, positions: list[int], events: Mapping[int, tuple[str, int]], verdict: Verdict
) -> None:
    found = verdict.findings
    latest: dict[str, int] = {}
    seen: set[int] = set()
    for position in positions:
        if position in seen:
            found["doubled"].append(f"{name} has handled event {position} again")
            continue
        seen.add(position)
        if position not in events:
            found["leaked"].append(f"{name} has handled event {position}, which is not committed")
            continue
        stream, version = events[position]
        if version < latest.get(stream, 0):
            found["out_of_order"].append(
                f"{name} has handled {stream}@{version} after {stream}@{latest[stream]}"
            )
        latest[stream] = max(version, latest.get(stream, 0))
    for position in events.keys() - seen:
        stream, version = events[position]
        found["lost"].append(f"{name} has not handled event {position}, {stream}@{version}")
