"""The pure model: what was staged, committed and accepted, and which promises that must keep.

It knows no database and no broker. The machine tells it what it did and what it sees, step by step;
each ``check_…`` raises AssertionError with the jobs that break a promise of the design (P1 to P7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: What a job is like. Only the first two kinds leave the order of their key alone.
PLAIN = "plain"
EXPIRED = "expired"  # its ``expires`` has passed when it is staged
HELD = "held"  # due later than the hold horizon
REFUSED = "refused"  # the broker refuses its queue
SCRIBBLED = "scribbled"  # its body was damaged by hand; it can be sent all the same
DAMAGED = "damaged"  # its envelope was damaged by hand
STRANGER = "stranger"  # its Celery app is not loaded in the drainer
#: Kinds of jobs that can never be sent.
MORTAL = (REFUSED, DAMAGED, STRANGER)


class Spec(NamedTuple):
    """A job to stage."""

    kind: str = PLAIN
    key: str = ""
    app: int = 0


class Recorded(NamedTuple):
    """An incident, as far as promise P5 speaks of it."""

    kind: str
    #: Id of the drainer that is to blame; empty for people.
    drainer: str
    shards: frozenset[int]
    first_id: int
    last_id: int

    def concerns(self, job: Job) -> bool:
        """Say whether it is recorded of this job."""
        ids = any(self.first_id <= id <= self.last_id for id in job.ids)
        return ids and job.shard in self.shards


@dataclass
class Job:
    """A job that was staged, whatever became of its transaction."""

    task_id: str
    spec: Spec
    transaction: int
    shard: int
    #: The ids of its rows: a requeued job has several.
    ids: set[int]
    staged_at: int
    committed_at: int | None = None
    rolled_back: bool = False
    discarded: bool = False
    #: How often a person has staged it again.
    requeued: int = 0
    #: Places in the order in which the broker accepted messages.
    accepted: list[int] = field(default_factory=list)
    #: Ids of the drainers that sent those.
    senders: list[str] = field(default_factory=list)

    def before(self, other: Job) -> bool:
        """Say whether P7 orders this job before the other one of its key."""
        if self.transaction == other.transaction:
            return self.staged_at < other.staged_at
        return self.committed_at is not None and self.committed_at < other.staged_at


class Model:
    """All jobs of one run."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._now = 0
        self._accepted = 0

    def staged(self, task_id: str, spec: Spec, *, transaction: int, id: int, shard: int) -> None:
        """Note a job, staged in a transaction that is open."""
        self.jobs[task_id] = Job(task_id, spec, transaction, shard, {id}, self._tick())

    def committed(self, transaction: int) -> None:
        """Note that a transaction has committed what was staged in it and not rolled back."""
        now = self._tick()
        for job in self.jobs.values():
            if job.transaction == transaction and not job.rolled_back:
                job.committed_at = now

    def rolled_back(self, task_ids: Iterable[str]) -> None:
        """Note that jobs went with their transaction or savepoint."""
        for task_id in task_ids:
            self.jobs[task_id].rolled_back = True

    def requeued(self, task_id: str, *, id: int) -> None:
        """Note that a person has staged a dead job again."""
        self.jobs[task_id].requeued += 1
        self.jobs[task_id].ids.add(id)

    def discarded(self, task_ids: Iterable[str]) -> None:
        """Note that a person has given up jobs for good."""
        for task_id in task_ids:
            self.jobs[task_id].discarded = True

    def accepted(self, task_id: str, sender: str) -> None:
        """Note that the broker took a message: only of a job that is committed by now (P1, P2)."""
        job = self.jobs.get(task_id)
        assert job is not None, f"published, but never staged: {task_id}"
        assert job.committed_at is not None, f"published, but not committed: {job}"
        self._accepted += 1
        job.accepted.append(self._accepted)
        job.senders.append(sender)

    def check_kept(self, staged: Mapping[str, int], dead: Mapping[str, str]) -> None:
        """P1 and P3: a committed job is staged, accepted, dead, or discarded.

        Args:
            staged: Task ids in the table, with their rows' ids.
            dead: Task ids in the dead table, with the errors that brought them there.
        """
        both = staged.keys() & dead.keys()
        assert not both, f"staged and dead at once: {both}"
        for task_id in (*staged, *dead):
            job = self.jobs.get(task_id)
            assert job is not None, f"in a table, but never staged: {task_id}"
            assert job.committed_at is not None, f"in a table, but not committed: {job}"
        for task_id, error in dead.items():
            job = self.jobs[task_id]
            may_die = job.spec.kind in MORTAL or error.endswith("KeyBlocked")
            assert may_die, f"dead without a reason of its own: {job} {error}"
        gone = [
            job
            for job in self.jobs.values()
            if job.committed_at
            and not (job.accepted or job.discarded or job.task_id in staged or job.task_id in dead)
        ]
        assert not gone, f"lost: {gone}"

    def check_order(self) -> None:
        """P7: the first acceptances of a key come in the order in which its jobs were staged.

        Celery apps may have different brokers, so a key is one of one app.
        """
        keys: dict[tuple[int, str], list[Job]] = {}
        for job in self.jobs.values():
            if job.spec.key and job.committed_at:
                keys.setdefault((job.spec.app, job.spec.key), []).append(job)
        for jobs in keys.values():
            if any(job.spec.kind not in (PLAIN, EXPIRED) or job.requeued for job in jobs):
                continue
            sent = [job for job in jobs if job.spec.kind == PLAIN]
            for later in sent:
                for earlier in sent if later.accepted else ():
                    if earlier.before(later):
                        in_order = earlier.accepted and earlier.accepted[0] < later.accepted[0]
                        assert in_order, f"out of order: {later} before {earlier}"

    def check_covered(self, incidents: Collection[Recorded], *, sends_of_an_attempt: int) -> None:
        """P5: every extra publish of a job belongs to an incident.

        Of several drainers that sent a job, all but one were to blame: they were taken for dead, or
        did not hear what became of it. One that sent it again is to blame as well, and has not
        heard each time. A requeue by a person allows one more of each. What the process that
        committed may have sent goes again after an incident of its own, which names no drainer.

        Args:
            incidents: Everything that was recorded.
            sends_of_an_attempt: How often one attempt may publish a job: twice where a batch of
                which a row was refused is sent again one by one.
        """
        for job in self.jobs.values():
            causes = [incident for incident in incidents if incident.concerns(job)]
            tries = 1 + sum(cause.kind == "requeue" for cause in causes)
            assert tries > job.requeued, f"a requeue is not recorded: {job} {causes}"
            blamed = {cause.drainer for cause in causes}
            explained = "" in blamed or "" not in job.senders or len(job.senders) == 1
            assert explained, f"sent again after its commit: {job} {causes}"
            blameless = set(job.senders) - blamed
            assert len(blameless) <= tries, f"sent by {blameless}: {job} {causes}"
            for sender, sends in Counter(job.senders).items():
                unheard = [cause.drainer for cause in causes if cause.kind == "unknown"]
                most = tries
                if sender in blamed:
                    most = (tries + unheard.count(sender)) * sends_of_an_attempt
                assert sends <= most, f"sent {sends} times by {sender}: {job} {causes}"

    def _tick(self) -> int:
        self._now += 1
        return self._now
