"""All single faults of a turn: at each statement, a drainer is paused, killed, or gets an error.

The machine takes random steps; these tests are complete, but with only one fault, in the three
situations in which shards change owners.
"""

from __future__ import annotations

from itertools import count

import pytest

from .fault_injector import Plan
from .machine import Machine
from .model import DAMAGED, Spec

pytestmark = [pytest.mark.django_db(transaction=True)]

JOBS = [Spec(key="a"), Spec(key="a"), Spec(), Spec(DAMAGED)]


def two_start_at_once(machine):
    machine.state.start()
    machine.state.start()


def one_has_joined_another(machine):
    machine.start_drainer(None)
    machine.start_drainer(None)
    machine.state.pass_time(20)


def one_has_died(machine):
    machine.start_drainer(Plan("kill", "published_not_deleted"))
    machine.state.pass_time(70)
    two_start_at_once(machine)


@pytest.mark.parametrize("action", ["pause", "kill", "fail", "lose"])
@pytest.mark.parametrize(
    "situation", [two_start_at_once, one_has_joined_another, one_has_died], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("alias", [pytest.param("default", id="sqlite")], indirect=True)
def test_a_fault_at_any_statement_breaks_no_promise(make_stage, situation, action):
    stage = make_stage("memory://", "Memory")
    for nth in count(1):
        machine = Machine(stage)
        machine.begin(batch_size=100, dead_key="pass")
        try:
            machine.stage_jobs(JOBS, commit=True)
            situation(machine)
            machine.stage_jobs([Spec(key="a"), Spec()], commit=True)
            one, other = machine.state.alive
            one.go(Plan(action, "sql", nth))
            reached = one.has_met_its_plan
            for injector in (other, other, one, other, one):
                if injector.alive:
                    injector.go()
                machine.state.check()
        finally:
            machine.teardown()
        if not reached:
            assert nth > 5
            return
