"""The history of a run of the machine, which the judge of ``outbox_app.history`` reads.

It knows no database and no broker. The machine tells it what it did and what it sees, step by step.
``check`` raises AssertionError with what breaks a promise (P1 to P7). Time is the number of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from outbox_app.history import Record, judge

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
#: What the machine shows at any time; P5 only when all is drained.
ALWAYS = ("P1", "P2", "P3", "P7")


class Spec(NamedTuple):
    """A job to stage."""

    kind: str = PLAIN
    key: str = ""
    app: int = 0


class Model:
    """What was done to the jobs of one run."""

    def __init__(self) -> None:
        #: What each job is like, whatever became of its transaction.
        self.specs: dict[str, Spec] = {}
        self._history: list[Record] = []
        self._shards: dict[str, int] = {}

    def staged(self, task_id: str, spec: Spec, *, transaction: int, id: int, shard: int) -> None:
        """Note a job, staged in a transaction that is open."""
        self.specs[task_id], self._shards[task_id] = spec, shard
        facts = {"job": task_id, "row": id, "shard": shard, "transaction": transaction}
        # Jobs of one key go to one app's broker. An expired one may be there before or after.
        key = "" if spec.kind == EXPIRED else spec.key
        self._note("stage", **facts, key=key, app=spec.app, apart=spec.kind != PLAIN)

    def committed(self, transaction: int) -> None:
        """Note that a transaction has committed what was staged in it and not rolled back."""
        self._note("commit", transaction=transaction)

    def rolled_back(self, task_ids: Iterable[str]) -> None:
        """Note that jobs went with their transaction or savepoint."""
        for task_id in task_ids:
            self._note("undo", job=task_id)

    def requeued(self, task_id: str, *, id: int) -> None:
        """Note that a person has staged a dead job again."""
        self._note("stage", job=task_id, row=id, shard=self._shards[task_id])

    def discarded(self, task_ids: Iterable[str]) -> None:
        """Note that a person has given up jobs for good."""
        for task_id in task_ids:
            self._note("discard", job=task_id)

    def accepted(self, task_id: str, sender: str) -> None:
        """Note that the broker took a message. No sender: the process that committed."""
        self._note("publish", job=task_id, sender=sender)

    def times_accepted(self) -> list[int]:
        """Return how often the broker took each job, in the order of staging."""
        taken = [record["job"] for record in self._history if record.what == "publish"]
        return [taken.count(task_id) for task_id in self.specs]

    def check(
        self,
        staged: Iterable[str],
        dead: Mapping[str, tuple[str, str]],
        incidents: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        """Check the promises that hold at any time; with ``incidents`` also P5.

        Args:
            staged: Task ids in the table.
            dead: Task ids in the dead table, with the errors that brought them there and reasons.
            incidents: Everything that was recorded.
        """
        for task_id, (error, _) in dead.items():
            may_die = self.specs[task_id].kind in MORTAL or error.endswith("KeyBlocked")
            assert may_die, f"dead without a reason of its own: {task_id} {error}"
        found = [
            *self._history,
            *(Record("row", {"job": task_id}) for task_id in staged),
            *(Record("dead", {"job": id, "reason": reason}) for id, (_, reason) in dead.items()),
            *(Record("incident", facts) for facts in incidents or ()),
        ]
        promises = ALWAYS if incidents is None else (*ALWAYS, "P5")
        verdict = judge(found, promises=promises)
        assert verdict.holds, verdict.findings

    def _note(self, what: str, **facts: Any) -> None:
        now = len(self._history)
        self._history.append(Record(what, facts, began=now, ended=now))
