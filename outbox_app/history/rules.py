"""What each promise means in a history: a rule yields a sentence for each record that breaks it.

Orders are judged as by Herlihy and Wing (Linearizability, 1990): a thing that ended before another
began comes first; things that overlap may come in any order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from .record import FAILED, OK, UNKNOWN, Record

#: Seconds within which the incident of an extra publish must be recorded: a frozen drainer writes
#: it when it continues, and a drainer without a database when the database is back.
LATE = 60.0
#: Hard things that a history shows by itself. Happenings count by their names.
TAKEOVER, IN_DOUBT, BELOW = "takeover", "unknown outcome", "late commit below a cursor"
ROLLED_BACK, EXTRA, LOST_RUN = "rollback", "extra publish", "lost run"

Rule = Callable[["Books"], Iterator[str]]
RULES: dict[str, list[Rule]] = defaultdict(list)


class Span(NamedTuple):
    """Something with its extent: in time, or in an order that is known."""

    item: Any
    began: float
    ended: float


def _turned(spans: Iterable[Span]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of which the first came later, and had ended before the second began."""
    latest = Span(None, -inf, -inf)
    for span in spans:
        if span.ended < latest.began:
            yield span.item, latest.item
        if span.began > latest.began:
            latest = span


def _in_time(records: Iterable[Record]) -> list[Record]:
    """Sort what several processes did by its end; without times it stays in its order."""
    return sorted(records, key=lambda record: -inf if record.ended is None else record.ended)


def _by(records: Iterable[Record], *names: str) -> dict[Any, list[Record]]:
    found: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        key = tuple(record.get(name) for name in names)
        found[key if len(names) > 1 else key[0]].append(record)
    return found


class Books:
    """The records, sorted for the rules: what failed is left out, except commands and runs."""

    def __init__(self, records: Iterable[Record], sends_of_an_attempt: int) -> None:
        self.sends_of_an_attempt = sends_of_an_attempt
        #: What has happened, and what may have happened.
        self.of: dict[str, list[Record]] = defaultdict(list)
        self.may: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.what in ("transaction", "command", "run") or record.outcome == OK:
                self.of[record.what].append(record)
            elif record.outcome == UNKNOWN:
                self.may[record.what].append(record)
        # A process that may be killed writes that a transaction has begun, outcome unknown.
        self.transactions = {r["id"]: r for r in self.of["transaction"]}
        self.of["transaction"] = list(self.transactions.values())
        self.commits = {record["transaction"]: record for record in self.of["commit"]}
        undone = {record["job"] for record in self.of["undo"]}
        staged = (record for record in self.of["stage"] if record["job"] not in undone)
        #: The rows of committed jobs, by job: a requeued one has several.
        self.jobs = _by(filter(self.is_committed, staged), "job")
        self.known = self.jobs.keys() | {r["job"] for r in self.may["stage"]}
        self.publishes = _by(_in_time(self.of["publish"]), "job")
        self.dead = {record["job"]: record["reason"] for record in self.of["dead"]}
        self.rows = Counter(record["job"] for record in self.of["row"])
        self.gone = {record["job"] for record in self.of["discard"]}
        self.events = {(r.get("log"), r["position"]): r for r in self.of["event"]}
        self.possible = {(r.get("log"), r["position"]) for r in self.may["event"]}

    def is_committed(self, record: Record) -> bool:
        return record.get("transaction") is None or record["transaction"] in self.commits

    def extent_of_commit(self, transaction: Any) -> Span:
        """Return when a transaction was committed: by the database's record, or its process's."""
        commit, heard = self.commits.get(transaction), self.transactions.get(transaction)
        known = commit if commit and commit.ended is not None else heard
        return _extent(known) if known else Span(None, -inf, inf)

    def causes(self, job: str) -> list[Record]:
        """Return the incidents that concern a job, recorded until soon after its last publish."""
        rows, last = self.jobs[job], max(_extent(r).ended for r in self.publishes[job])
        return [
            incident
            for incident in self.of["incident"]
            if (incident.ended or -inf) <= last + LATE
            and any(
                incident["first"] <= row["row"] <= incident["last"]
                and row["shard"] in incident["shards"]
                for row in rows
            )
        ]

    def span(self, record: Record) -> Span:
        """Return where a staged job stands in the order of its key."""
        if (order := record.get("order")) is not None:
            return Span(record, order, order)
        return _extent(record)._replace(
            ended=self.extent_of_commit(record.get("transaction")).ended
        )

    def extent_of_event(self, event: Record) -> Span:
        """Return from when on an event could see others, and when it could be seen."""
        if event.get("transaction") is None:
            return _extent(event)
        return _extent(event)._replace(ended=self.extent_of_commit(event["transaction"]).ended)

    def handled(self) -> dict[str, list[Record]]:
        """Return what subscriptions have handled, in time; also of those that handled nothing."""
        silent: dict[str, list[Record]] = {r["name"]: [] for r in self.of["subscription"]}
        return {**silent, **_by(_in_time(self.of["handle"]), "subscription")}

    def runs(self) -> dict[str, list[Record]]:
        """Return the runs of each job, by their beginnings."""
        began = sorted(self.of["run"], key=lambda r: -inf if r.began is None else r.began)
        return _by(began, "job")

    def partitions(self, name: str) -> int:
        declared = (r for r in self.of["subscription"] if r["name"] == name)
        return max((int(record.get("partitions", 1)) for record in declared), default=1)

    def happened(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for record in self.of["happening"]:
            found[record["name"]] += record.get("count", 1)
        found[TAKEOVER] += sum(i["kind"] == "takeover" for i in self.of["incident"])
        for what in ("transaction", "publish", "command", "decide"):
            found[IN_DOUBT] += sum(r.outcome == UNKNOWN for r in (*self.of[what], *self.may[what]))
        found[ROLLED_BACK] += sum(r.outcome == FAILED for r in self.of["transaction"])
        found[LOST_RUN] += sum(r.outcome == UNKNOWN for r in self.of["run"])
        found[EXTRA] += sum(len(each) - 1 for each in self.publishes.values())
        for name, records in self.handled().items():
            if self.partitions(name) == 1:
                found[BELOW] += sum(b["position"] < a["position"] for a, b in pairwise(records))
        return +found


def rule(promise: str) -> Callable[[Rule], Rule]:
    def enter(each: Rule) -> Rule:
        RULES[promise].append(each)
        return each

    return enter


@rule("P1")
def _transactions(books: Books) -> Iterator[str]:
    for record in books.of["transaction"]:
        if record.outcome == OK and record["id"] not in books.commits:
            yield f"transaction {record['id']} was committed, and is not there"
        if record.outcome == FAILED and record["id"] in books.commits:
            yield f"transaction {record['id']} was rolled back, and is there"


@rule("P1")
def _rows(books: Books) -> Iterator[str]:
    for job, count in books.rows.items():
        if job not in books.known:
            yield f"job {job} has a row, and is not committed"
        if count > 1:
            yield f"job {job} has {count} rows at once"
    yield from (f"job {j} is dead, and is not committed" for j in books.dead.keys() - books.known)


@rule("P2")
def _leaked(books: Books) -> Iterator[str]:
    for job, publishes in books.publishes.items():
        if job not in books.known:
            yield f"job {job} was published, and is not committed"
        elif job in books.jobs:
            transaction = books.jobs[job][0].get("transaction")
            sent = publishes[0].ended
            if sent is not None and sent < books.extent_of_commit(transaction).began:
                yield f"job {job} was published at {sent}, before transaction {transaction}"


@rule("P3")
def _lost(books: Books) -> Iterator[str]:
    accounted = books.publishes.keys() | books.dead.keys() | books.rows.keys() | books.gone
    for job in books.jobs.keys() - accounted:
        yield f"job {job} is committed, and neither published nor dead: {where(books.jobs[job])}"
    for job, reason in books.dead.items():
        if not reason:
            yield f"job {job} is dead without a reason"
        if job in books.rows:
            yield f"job {job} is dead, and has a row"


@rule("P5")
def _unexplained(books: Books) -> Iterator[str]:
    for job, publishes in books.publishes.items():
        if job not in books.jobs or (len(publishes) == 1 and len(books.jobs[job]) == 1):
            continue
        causes = books.causes(job)
        kinds = Counter(cause["kind"] for cause in causes)
        tries = 1 + kinds["requeue"] + kinds["no_receipt"]
        if len(books.jobs[job]) > 1 + kinds["requeue"]:
            yield f"job {job} was requeued, and no incident says so: {where(books.jobs[job])}"
        others = len(causes) - tries + 1
        allowed: float = tries + others * books.sends_of_an_attempt
        senders = [record.get("sender") for record in publishes]
        # A known sender must be to blame for what it has sent too often.
        if None not in senders:
            allowed = inf if _is_explained(senders, causes, tries, books) else 0
        if len(publishes) > allowed:
            yield (
                f"job {job} was published {len(publishes)} times, by {senders}, and its incidents "
                f"explain fewer: {[dict(each.facts) for each in causes]}; {where(books.jobs[job])}"
            )


def _is_explained(
    senders: Collection[str], causes: Collection[Record], tries: int, books: Books
) -> bool:
    """Return whether incidents blame the senders. "" is the process that committed."""
    blamed = {cause.get("drainer", "") for cause in causes}
    if "" in senders and "" not in blamed and len(senders) > 1:
        return False
    if len({*senders} - blamed) > tries:
        return False
    unheard = Counter(cause.get("drainer", "") for cause in causes if cause["kind"] == "unknown")
    return all(
        count
        <= ((tries + unheard[sender]) * books.sends_of_an_attempt if sender in blamed else tries)
        for sender, count in Counter(senders).items()
    )


@rule("P6")
def _effects(books: Books) -> Iterator[str]:
    effects = Counter(record["job"] for record in books.of["execute"])
    for job, count in effects.items():
        if job not in books.known:
            yield f"job {job} had its effect, and is not committed"
        if count > 1:
            yield f"job {job} had its effect {count} times"
    possible = {record["job"] for record in books.may["execute"]}
    for job in books.publishes.keys() - effects.keys() - possible:
        yield f"job {job} was published, and had no effect"


@rule("P7")
def _job_order(books: Books) -> Iterator[str]:
    place: dict[str, int] = {}
    for n, record in enumerate(_in_time(books.of["publish"])):
        place.setdefault(record["job"], n)
    for (_, key), staged in _by((r[0] for r in books.jobs.values()), "app", "key").items():
        # The order of a key is not promised if one of its jobs was requeued, refused or held.
        if not key or any(
            record.get("apart") or len(books.jobs[record["job"]]) > 1 or record["job"] in books.dead
            for record in staged
        ):
            continue
        sent = [record for record in staged if record["job"] not in books.gone]
        sent.sort(key=lambda record: place.get(record["job"], inf))
        for later, first in [*_turned(map(books.span, sent)), *_turned_inside(sent)]:
            if first["job"] in place:
                yield f"key {key}: {where([first])} was published before {where([later])}"


def _turned_inside(records: Iterable[Record]) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of ``_turned`` inside each transaction, which has one order."""
    for transaction, inside in _by(records, "transaction").items():
        if transaction is not None:
            yield from _turned(Span(r, r.began or 0.0, r.began or 0.0) for r in inside)


@rule("P8")
def _subscriptions(books: Books) -> Iterator[str]:
    for name, records in books.handled().items():
        handled: dict[Any, Record] = {}
        for record in records:
            place = record.get("log"), record["position"]
            event = books.events.get(place)
            if event is None or not books.is_committed(event):
                if place not in books.possible:
                    yield f"{name} has handled event {place}, which is not committed"
            elif place in handled:
                yield f"{name} has handled event {place} again"
            else:
                handled[place] = event
        for stream, events in _by(handled.values(), "log", "stream").items():
            versions = (Span(e, e["version"], e["version"]) for e in events)
            for later, first in _turned(versions):
                versions_of = f"version {first['version']} before {later['version']}"
                yield f"{name} has handled {versions_of} of {stream[1]}"
        if books.partitions(name) == 1:
            for later, first in _turned(map(books.extent_of_event, handled.values())):
                seen = f"{dict(later.facts)}, which its writer could see"
                yield f"{name} has handled {dict(first.facts)} before {seen}"
        maybe = [r for r in books.may["handle"] if r["subscription"] == name]
        logs = {record.get("log") for record in [*records, *maybe]}
        for place in books.events.keys() - handled.keys():
            if place in {(r.get("log"), r["position"]) for r in maybe}:
                continue
            if books.is_committed(books.events[place]) and (not records or place[0] in logs):
                yield f"{name} has not handled event {place}"


@rule("P9")
def _commands(books: Books) -> Iterator[str]:
    versions = _by(books.of["version"], "entity", "command")
    for (entity, id), found in versions.items():
        if id is not None and len(found) > 1:
            numbers = [record["version"] for record in found]
            yield f"command {id} of {entity} was executed as versions {numbers}"
    answers = _by((r for r in books.of["command"] if r.outcome == OK), "entity", "id")
    for (entity, id), found in answers.items():
        different = {(r.get("version"), repr(r.get("answer"))) for r in found}
        if len(different) > 1:
            yield f"command {id} of {entity} was answered differently: {sorted(different, key=str)}"
        for version, _ in different:
            kept = versions.get((entity, id), ())
            if version is not None and version not in [record["version"] for record in kept]:
                yield f"command {id} of {entity} was answered with version {version}: not there"
        for call in found:
            expected, version = call.get("expected"), call.get("version")
            if None not in (expected, version) and version != expected + 1:
                yield f"command {id} of {entity} expected {expected}, and has version {version}"
    for key, found in _by(books.of["command"], "entity", "expected").items():
        done = {r["id"]: r for r in found if r.outcome == OK}
        if key[1] is not None and len(done) > 1:
            yield f"commands {sorted(done)} of {key[0]} all expected version {key[1]}"
    calls = _by(books.of["command"], "entity", "id")
    spans: dict[Any, list[Span]] = defaultdict(list)
    for (entity, id), found in answers.items():
        if found[0].get("version") is not None:  # it was executed in one of its calls
            began = min(_extent(call).began for call in calls[entity, id])
            spans[entity].append(Span(found[0], began, min(_extent(c).ended for c in found)))
    for entity, each in spans.items():
        each.sort(key=lambda span: span.item["version"])
        for later, first in _turned(each):
            yield f"{entity}: {first['id']} came before {later['id']}, which ended before it began"


@rule("P12")
def _without_effect(books: Books) -> Iterator[str]:
    versions = _by(books.of["version"], "entity", "command")
    for (entity, id), calls in _by(books.of["command"], "entity", "id").items():
        if (entity, id) in versions and all(call.outcome == FAILED for call in calls):
            yield f"command {id} of {entity} has raised, and has a version"


@rule("P10")
def _prepared(books: Books) -> Iterator[str]:
    published = Counter(record["event"] for record in books.of["published"])
    open_ = {record["event"] for record in books.of["undecided"]}
    sent: dict[str, Any] = {r["event"]: r["transaction"] for r in books.of["prepare"]}
    for event, transaction in sent.items():
        committed = transaction in books.commits
        if published[event] > 1:
            yield f"prepared event {event} was published {published[event]} times"
        if published[event] and not committed:
            yield f"prepared event {event} was published, and {transaction} is not committed"
        if committed and not published[event] and event not in open_:
            yield f"prepared event {event} is not published, and {transaction} has committed"
    for event in published.keys() - sent.keys():
        yield f"prepared event {event} was published, and never prepared"
    for event, decisions in _by(books.of["decide"], "event").items():
        final = {record["wanted"] for record in decisions}
        if len(final) > 1:
            yield f"prepared event {event} was {' and '.join(sorted(final))}"
        if final == {"cancelled"} and published[event]:
            yield f"prepared event {event} was cancelled, and published"


@rule("P13")
def _ids(books: Books) -> Iterator[str]:
    for id, count in Counter(record["id"] for record in books.of["id"]).items():
        if count > 1:
            yield f"id {id} was made {count} times"


def _extent(record: Record) -> Span:
    began = -inf if record.began is None else record.began
    is_open = record.ended is None or record.outcome == UNKNOWN  # it may take effect later
    return Span(record, began, inf if is_open else record.ended)  # type: ignore[arg-type]


def where(rows: Iterable[Record]) -> str:
    return ", ".join(f"{r['job']} (row {r['row']}, shard {r['shard']})" for r in rows)
