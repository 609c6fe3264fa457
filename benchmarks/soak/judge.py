"""The judge: everything that was committed beside everything that left, was handled and executed.

Nothing is sampled, and nothing here knows a database: ``judge`` is given the books of a run.
``lost`` is committed and neither accepted nor dead, or an event that a subscription has not
handled; ``leaked`` is accepted, handled or executed without having been committed; ``doubled`` are
effects that happened twice (promises P6 and P8); ``unexplained`` are publishes beyond the first
that no recorded incident allows (P5); ``out_of_order`` are first acceptances of one key against the
order in which they were staged (P7), and events of one stream handled against their versions (P8).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Seconds after an extra publish within which its incident has to be there: a drainer that was
#: frozen writes it when it wakes, one without a database when that is back.
LATE = 60.0
VERDICTS = ("lost", "leaked", "doubled", "unexplained", "out_of_order")


class Row(NamedTuple):
    """A row of the outbox that was committed. ``number`` ascends in the order of staging."""

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
    """An incident, as far as promise P5 speaks of it."""

    kind: str
    shards: frozenset[int]
    first_id: int
    last_id: int
    at: float

    def concerns(self, row: Row) -> bool:
        """Say whether it is recorded of this row."""
        return self.first_id <= row.id <= self.last_id and row.shard in self.shards


@dataclass
class Books:
    """What happened in a run."""

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
    #: Transactions that are committed, and those of which a writer heard that they are, or not.
    committed: Collection[str] = ()
    heard_committed: Collection[str] = ()
    heard_rolled_back: Collection[str] = ()
    #: How often one attempt may publish a job: twice where a batch is one pipeline, of which a
    #: command may be refused: its jobs go again one by one.
    sends_of_an_attempt: int = 2


@dataclass
class Verdict:
    """What did not hold, each with a line that names it, and how many publishes were explained."""

    findings: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: int = 0

    def count(self, name: str) -> int:
        """Return how often one of VERDICTS was found."""
        return len(self.findings.get(name, ()))

    @property
    def holds(self) -> bool:
        """Whether nothing was found."""
        return not any(self.findings.values())


def judge(books: Books) -> Verdict:
    """Return what did not hold."""
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
    """Return how many publishes beyond the first the recorded incidents allow a job."""
    causes = [
        incident
        for incident in books.incidents
        if incident.at <= last + LATE and any(incident.concerns(row) for row in rows)
    ]
    requeued = sum(incident.kind == "requeue" for incident in causes)
    others = len(causes) - requeued
    # With one to blame for it, each attempt may have published as often as an attempt can.
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
            continue  # requeued, or refused: its key has no order to keep
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
