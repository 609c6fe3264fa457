"""The state machine: staging, draining, crashing and requeueing, against the pure model.

Hypothesis chooses the steps. After each the promises that must hold at any time are checked; at the
end all drainers die, their leases run out, the broker works, zombies go on, and what is left is
drained: then nothing may be missing, and every extra publish must belong to an incident. Time is
virtual: ``time_passes`` moves the drainers' clocks on, and what the database remembers back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock
from uuid import UUID

from django.db import transaction
from django.db.models import F
from django.test import override_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from outbox_app.delivery import lease
from outbox_app.models import DeadJob, Drainer, Incident, Lease, StagedJob
from outbox_app.operations import dead

from .brokers import Broker
from .model import (
    DAMAGED,
    EXPIRED,
    HELD,
    PLAIN,
    REFUSED,
    SCRIBBLED,
    STRANGER,
    Model,
    Recorded,
    Spec,
)
from .puppet import FAILPOINTS, Plan, Puppet, set_failpoints
from .writer import DUE, LateWriter, Writer

#: In seconds of virtual time. The database's clock goes on in real time too, but no sum of TIMES
#: comes near the lease from below.
LEASE, TIMES = 69, (10, 70, DUE)
MAX_DRAINERS = 3

_ODD = (EXPIRED, HELD, REFUSED, SCRIBBLED, DAMAGED, STRANGER)
# Keys a and b keep P7's order; the other jobs are there to disturb them.
jobs = st.lists(
    st.one_of(
        st.builds(Spec, st.just(PLAIN), st.sampled_from(["a", "b", ""]), st.integers(0, 1)),
        st.builds(Spec, st.sampled_from([PLAIN, EXPIRED]), st.sampled_from(["a", "b"]), st.just(0)),
        st.builds(Spec, st.sampled_from(_ODD), st.sampled_from(["", "x"]), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=5,
)
which = st.integers(0, MAX_DRAINERS - 1)


def plans(*actions: str) -> st.SearchStrategy[Plan]:
    """Plans of these actions, at an operation that a turn is likely to pass."""
    points = FAILPOINTS if set(actions) <= {"pause", "kill"} else ("commit",)
    return st.one_of(
        st.builds(Plan, st.sampled_from(actions), st.sampled_from(where), st.integers(1, most))
        for where, most in [((*points, "send"), 1), ((*points, "send"), 3), (("sql",), 12)]
    )


@dataclass
class Stage:
    """Where the machine plays: a database, a broker and what Celery offers."""

    alias: str
    #: One task of each Celery app.
    tasks: Sequence[Any]
    #: Empties the broker, and makes it refuse its refused queue, or take it.
    reset_broker: Callable[[bool], None]
    #: Whether a row can be written while another transaction has written one.
    concurrent_writers: bool = True


class Machine(RuleBasedStateMachine):
    """See the module.

    Args:
        stage: Where it plays.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.using = stage.alias
        self.model = Model()
        self.writer = Writer(using=stage.alias, tasks=stage.tasks, model=self.model)
        self.late: LateWriter | None = None
        self.puppets: list[Puppet] = []
        self.dead: dict[str, str] = {}
        self.transactions = 0
        self.passed = 0.0
        self.begun = False
        self.patches = ExitStack()
        for model in (StagedJob, DeadJob, Incident, Drainer):
            model.objects.using(self.using).all().delete()
        Lease.objects.using(self.using).update(owner=None)
        set_failpoints(on=True)

    @initialize(
        batch_size=st.sampled_from([100, 1, 3]),
        batches=st.booleans(),
        dead_key=st.sampled_from(["pass", "block"]),
    )
    def begin(self, batch_size: int, batches: bool, dead_key: str) -> None:
        Broker.current = self.broker = Broker(self.model.accepted, batches=batches)
        self.stage.reset_broker(True)
        # Drainers' ids decide on who gets which shards; from a counter, so that runs repeat.
        ids = (UUID(int=number) for number in count(1))
        self.begun = True
        self.patches.enter_context(mock.patch.object(lease, "uuid4", ids.__next__))
        self.patches.enter_context(
            override_settings(
                OUTBOX={
                    "DATABASE": self.using,
                    "BATCH_SIZE": batch_size,
                    "DEAD_KEY": dead_key,
                    "LEASE_SECONDS": LEASE,
                    "MAX_BACKOFF": 0,
                    "WAKE": False,
                }
            )
        )

    # Staging

    @rule(specs=jobs, commit=st.booleans())
    def stage_jobs(self, specs: list[Spec], commit: bool) -> None:
        with transaction.atomic(using=self.using):
            number = self._next_transaction()
            staged = self.writer.stage(specs, transaction=number)
            if not commit:
                transaction.set_rollback(True, using=self.using)
                self.model.rolled_back(staged)
        if commit:
            self.model.committed(number)

    @rule(specs=jobs, inside=jobs, commit=st.booleans())
    def stage_in_savepoint(self, specs: list[Spec], inside: list[Spec], commit: bool) -> None:
        with transaction.atomic(using=self.using):
            number = self._next_transaction()
            self.writer.stage(specs, transaction=number)
            with transaction.atomic(using=self.using):
                staged = self.writer.stage(inside, transaction=number)
                if not commit:
                    transaction.set_rollback(True, using=self.using)
                    self.model.rolled_back(staged)
        self.model.committed(number)

    @precondition(lambda self: self.stage.concurrent_writers)
    @rule(specs=jobs)
    def stage_in_late_transaction(self, specs: list[Spec]) -> None:
        if self.late is None:
            self.late = LateWriter(using=self.using)
            self.late_number = self._next_transaction()
            self.late_ids: list[str] = []
        self.late_ids += self.late.do(self.writer.stage, specs, transaction=self.late_number)

    @precondition(lambda self: self.late is not None)
    @rule(commit=st.booleans())
    def end_late_transaction(self, commit: bool) -> None:
        assert self.late is not None
        self.late.end(commit=commit)
        self.late = None
        if commit:
            self.model.committed(self.late_number)
        else:
            self.model.rolled_back(self.late_ids)

    # Draining. The first step starts a drainer, so a plan may concern its very first statements.

    @precondition(lambda self: len(self.alive) < MAX_DRAINERS)
    @rule(plan=st.none() | plans("pause"))
    def start_drainer(self, plan: Plan | None) -> None:
        self._start().go(plan)

    @rule(which=which)
    def turn(self, which: int) -> None:
        self._pick(which).go()

    @rule(which=which, plan=plans("pause"), specs=jobs, seconds=st.sampled_from([0, 70]))
    def pause(self, which: int, plan: Plan, specs: list[Spec], seconds: float) -> None:
        self.stage_jobs(specs, commit=True)
        self._pick(which).go(plan)
        self.time_passes(seconds)

    @rule(which=which, plan=plans("kill"), specs=jobs, seconds=st.sampled_from([0, 70]))
    def kill(self, which: int, plan: Plan, specs: list[Spec], seconds: float) -> None:
        self.stage_jobs(specs, commit=True)
        self._pick(which).go(plan)
        self.time_passes(seconds)

    @rule(which=which, plan=plans("fail", "lose"), specs=jobs)
    def fail(self, which: int, plan: Plan, specs: list[Spec]) -> None:
        self.stage_jobs(specs, commit=True)
        self._pick(which).go(plan)

    @precondition(lambda self: self.alive)
    @rule(which=which, plan=st.none() | plans("pause", "kill") | plans("fail", "lose"))
    def stop(self, which: int, plan: Plan | None) -> None:
        self._pick(which).stop(plan)

    @rule(seconds=st.sampled_from(TIMES))
    def time_passes(self, seconds: float) -> None:
        self.passed += seconds
        ago = timedelta(seconds=seconds)
        Drainer.objects.using(self.using).update(heartbeat_at=F("heartbeat_at") - ago)
        # One by one: on MariaDB an UPDATE that scans would wait for rows of the late transaction.
        held = StagedJob.objects.using(self.using).held()
        for id in list(held.values_list("id", flat=True)):
            held.filter(id=id).update(available_at=F("available_at") - ago)

    # Broker and people

    @rule(up=st.sampled_from([True, True, False]))
    def switch_broker(self, up: bool) -> None:
        self.broker.up = up

    @rule(refuses=st.sampled_from([True, True, False]))
    def switch_route(self, refuses: bool) -> None:
        self.broker.refuses = refuses
        self.stage.reset_broker(refuses)

    @precondition(lambda self: self.dead)
    @rule(which=st.none() | st.integers(0, 9), requeue=st.sampled_from([True, True, False]))
    def decide(self, which: int | None, requeue: bool) -> None:
        before = dict(DeadJob.objects.using(self.using).order_by("id").values_list("id", "task_id"))
        ids = None if which is None else [list(before)[which % len(before)]]
        jobs = dead.find(using=self.using, ids=ids)
        (dead.requeue if requeue else dead.discard)(jobs, using=self.using)
        after = DeadJob.objects.using(self.using).values_list("id", flat=True)
        for id in before.keys() - set(after):
            job = self.model.jobs[before[id]]
            job.requeued, job.discarded = job.requeued or requeue, not requeue

    # What must hold after each step

    @invariant()
    def promises_are_kept(self) -> None:
        self._check_jobs()
        self._check_owners()

    def _check_jobs(self) -> None:
        rows = StagedJob.objects.using(self.using).values_list("task_id", "id")
        staged = dict(rows)
        assert len(staged) == len(rows), f"staged twice: {rows}"
        for task_id, id in rows:
            self.model.jobs[task_id].ids.add(id)
        buried = DeadJob.objects.using(self.using).values_list("task_id", "error", "reason")
        assert all(error and reason for _, error, reason in buried)
        self.dead = {task_id: error for task_id, error, _ in buried}
        assert len(self.dead) == len(buried), f"dead twice: {buried}"
        counted = sum(puppet.drain.tally.expired for puppet in self.puppets if puppet.drain)
        self.model.check_kept(staged, self.dead, expired=counted)
        self.model.check_order()

    def _check_owners(self) -> None:
        owner = dict(Lease.objects.using(self.using).values_list("part", "owner"))
        seen: dict[int, Puppet] = {}
        for puppet in self.alive:
            # Amid its statements it may be changing what it owns; it then publishes nothing.
            if not puppet.trusts_itself or puppet.place == "sql":
                continue
            for part in puppet.drain.membership.owned:
                assert part not in seen, f"two drainers own shard {part}: {puppet} {seen[part]}"
                assert owner[part] == puppet.drain.membership.id, f"{puppet} lost shard {part}"
                seen[part] = puppet

    def teardown(self) -> None:
        try:
            if self.begun:
                self._finish()
        finally:
            if self.late is not None:
                self.late.end(commit=False)
            for puppet in self.alive:
                puppet.kill()
            set_failpoints(on=False)
            self.patches.close()

    def _finish(self) -> None:
        if self.late is not None:
            self.end_late_transaction(commit=True)
        self.broker.up = True
        zombies = self.alive
        self.time_passes(DUE)
        self._drain_all()
        for zombie in zombies:
            zombie.stop()
        self.time_passes(DUE)
        self._drain_all()
        for puppet in self.alive:
            puppet.stop()
        self.promises_are_kept()
        incidents = [
            Recorded(kind, frozenset(shards), first, last)
            for kind, shards, first, last in Incident.objects.using(self.using).values_list(
                "kind", "shards", "first_id", "last_id"
            )
        ]
        self.model.check_covered(incidents, sends_of_an_attempt=2 if self.broker.batches else 1)

    def _drain_all(self) -> None:
        """Let a new drainer drain everything."""
        puppet = self._start()
        left = StagedJob.objects.using(self.using)
        for _ in range(20 + 2 * left.count()):
            puppet.go()
            self.promises_are_kept()
            if not left.exists():
                return
            self.time_passes(TIMES[0])
        raise AssertionError(f"not drained: {list(left.values_list('task_id', flat=True))}")

    @property
    def alive(self) -> list[Puppet]:
        return [puppet for puppet in self.puppets if puppet.alive]

    def _start(self) -> Puppet:
        puppet = Puppet(using=self.using, clock=lambda: self.passed)
        self.puppets.append(puppet)
        return puppet

    def _pick(self, which: int) -> Puppet:
        alive = self.alive or [self._start()]
        return alive[which % len(alive)]

    def _next_transaction(self) -> int:
        self.transactions += 1
        return self.transactions
