"""The state machine: staging, draining, crashing and requeueing, against the pure model.

Hypothesis chooses the steps and what goes wrong in them. After each step the promises that must
hold at any time are checked, at the end those that hold once everything is drained: see
``model_state``.
"""

from __future__ import annotations

import sys

from django.db import transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outbox_app.jobs import dead
from outbox_app.models import DeadJob

from .fault_injector import FAILPOINTS, IMMEDIATE, Committer, FaultInjector, Plan
from .model import DAMAGED, EXPIRED, HELD, PLAIN, REFUSED, SCRIBBLED, STRANGER, Spec
from .model_state import ModelState, Stage
from .writer import DUE, LateWriter

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
mostly = st.sampled_from([True, True, False])
# Nothing, or so long that heartbeats are due, or more than the lease.
before, after = st.sampled_from([0, 20]), st.sampled_from([0, 70])


def plans(*actions: str) -> st.SearchStrategy[Plan]:
    """Plans of these actions, at an operation that a turn is likely to pass."""
    points = FAILPOINTS if set(actions) <= {"pause", "kill"} else ("commit",)
    places = [
        ((*points, "send"), 1),
        ((*points, "send"), 3),
        (("INSERT", "UPDATE", "DELETE"), 2),
        (("sql",), 12),
    ]
    return st.one_of(
        st.builds(Plan, st.sampled_from(actions), st.sampled_from(where), st.integers(1, most))
        for where, most in places
    )


schedules = st.lists(
    st.tuples(
        which,
        st.builds(
            Plan,
            st.sampled_from(["pause"] * 5 + ["fail", "lose", "kill"]),
            st.sampled_from(["sql", "UPDATE"]),
            st.integers(1, 4),
        ),
    ),
    min_size=4,
    max_size=16,
)


#: What happens to a process that publishes what it has committed.
commits = st.one_of(
    st.none(),
    st.builds(Plan, st.just("kill"), st.sampled_from(IMMEDIATE)),
    st.builds(Plan, st.sampled_from(["kill", "fail", "lose"]), st.just("send")),
)


class Machine(RuleBasedStateMachine):
    """See the module.

    Args:
        stage: Where it plays.
    """

    state: ModelState | None = None

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.transactions = 0
        self.handled = sys.exc_info()[1]

    @initialize(
        batch_size=st.sampled_from([100, 1, 3]),
        dead_key=st.sampled_from(["pass", "block"]),
    )
    def begin(self, batch_size: int, dead_key: str) -> None:
        self.state = ModelState(self.stage, BATCH_SIZE=batch_size, DEAD_KEY=dead_key)
        self.using, self.model, self.writer = (
            self.stage.alias,
            self.state.model,
            self.state.writer,
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

    @rule(specs=jobs, plan=commits)
    def stage_immediately(self, specs: list[Spec], plan: Plan | None) -> None:
        with Committer(plan), transaction.atomic(using=self.using):
            number = self._next_transaction()
            self.writer.stage(specs, transaction=number, immediate=True)
            self.model.committed(number)  # what it sends is sent before the block ends

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
        if self.state.late is None:
            self.state.late = LateWriter(using=self.using)
            self.late_number = self._next_transaction()
            self.late_ids: list[str] = []
        self.late_ids += self.state.late.do(self.writer.stage, specs, transaction=self.late_number)

    @precondition(lambda self: self.state.late)
    @rule(commit=st.booleans())
    def end_late_transaction(self, commit: bool) -> None:
        late, self.state.late = self.state.late, None
        late.end(commit=commit)
        if commit:
            self.model.committed(self.late_number)
        else:
            self.model.rolled_back(self.late_ids)

    # Draining. The first step starts a drainer, so a plan may concern its very first statements.

    @precondition(lambda self: len(self.state.alive) < MAX_DRAINERS)
    @rule(plan=st.none() | plans("pause"))
    def start_drainer(self, plan: Plan | None) -> None:
        self.state.start().go(plan)

    @rule(which=which)
    def turn(self, which: int) -> None:
        self.state.pick(which).go()

    @rule(
        which=which,
        plan=plans("pause"),
        specs=jobs,
        before=before,
        after=after,
        unnoticed=st.booleans(),
    )
    def pause(
        self,
        which: int,
        plan: Plan,
        specs: list[Spec],
        before: float = 0,
        after: float = 0,
        unnoticed: bool = False,
    ) -> None:
        injector = self._go(which, plan, specs, before)
        if unnoticed and injector.has_batch:
            injector.behind += after
        self.state.pass_time(after)

    @rule(which=which, plan=plans("kill"), specs=jobs, before=before, after=after)
    def kill(self, which: int, plan: Plan, specs: list[Spec], before: float, after: float) -> None:
        self._go(which, plan, specs, before)
        self.state.pass_time(after)

    @rule(which=which, plan=plans("fail", "lose"), specs=jobs, before=before)
    def fail(self, which: int, plan: Plan, specs: list[Spec], before: float) -> None:
        self._go(which, plan, specs, before)

    @rule(schedule=schedules, before=before | after)
    def race(self, schedule: list[tuple[int, Plan]], before: float) -> None:
        """Let two or three drainers go on by a few statements in turn."""
        while len(self.state.alive) < 2:
            self.state.start()
        self.state.pass_time(before)
        for which, plan in schedule:
            self.state.pick(which).go(plan)
            self.state.check()

    @precondition(lambda self: self.state.alive)
    @rule(which=which, plan=st.none() | plans("pause", "kill") | plans("fail", "lose"))
    def stop(self, which: int, plan: Plan | None) -> None:
        self.state.pick(which).stop(plan)

    @rule(seconds=st.sampled_from([20, 70, DUE]))
    def pass_time(self, seconds: float) -> None:
        self.state.pass_time(seconds)

    # The broker, and people

    @rule(up=mostly)
    def switch_broker(self, up: bool) -> None:
        self.state.broker.up = up

    @rule(refuses=mostly)
    def switch_route(self, refuses: bool) -> None:
        self.state.broker.refuses = refuses
        self.stage.reset_broker(refuses)

    @precondition(lambda self: self.state.dead)
    @rule(which=st.none() | st.integers(0, 9), requeue=mostly)
    def decide(self, which: int | None, requeue: bool) -> None:
        before = dict(DeadJob.objects.using(self.using).order_by("id").values_list("id", "task_id"))
        chosen = DeadJob.objects.using(self.using).all()
        if which is not None:
            chosen = chosen.filter(pk=list(before)[which % len(before)])
        (dead.requeue_dead if requeue else dead.discard_dead)(chosen)
        after = DeadJob.objects.using(self.using).values_list("id", flat=True)
        decided = [before[id] for id in before.keys() - set(after)]
        if requeue:
            self.writer.requeued(decided)
        else:
            self.model.discarded(decided)

    @invariant()
    def promises_are_kept(self) -> None:
        self.state.check()

    def teardown(self) -> None:
        if self.state is None:
            return
        try:
            if sys.exc_info()[1] is self.handled:  # no step has failed
                if self.state.late:
                    self.end_late_transaction(commit=True)
                self.state.finish()
        finally:
            self.state.close()

    def _go(self, which: int, plan: Plan, specs: list[Spec], before: float) -> FaultInjector:
        self.stage_jobs(specs, commit=True)
        self.state.pass_time(before)
        injector = self.state.pick(which)
        injector.go(plan)
        return injector

    def _next_transaction(self) -> int:
        self.transactions += 1
        return self.transactions
