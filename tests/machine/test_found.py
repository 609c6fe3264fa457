"""Failures that the machine has found, step by step, so that they are found every time."""

from __future__ import annotations

import pytest

from .fault_injector import Plan
from .machine import Machine
from .model import Spec

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def machine(make_stage):
    machine = Machine(make_stage("memory://", "Memory"))
    machine.begin(batch_size=100, dead_key="pass")
    yield machine
    machine.teardown()


def test_a_job_is_not_to_blame_for_a_lease_that_is_lost_while_its_queue_is_declared(alias, machine):
    machine.pause(0, Plan("pause", "claimed"), [Spec()], after=70)
    machine.start_drainer(Plan("pause", "claimed"))  # takes over
    machine.turn(0)
    machine.promises_are_kept()


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_batch_is_deleted_beside_an_open_transaction(alias, machine):
    """MariaDB scanned the small table, and waited for the rows of the others."""
    machine.stage_in_late_transaction([Spec(), Spec()])
    machine.stage_jobs([Spec()] * 8, commit=True)
    machine.turn(0)
    assert machine.model.times_accepted() == [0] * 2 + [1] * 8
    machine.end_late_transaction(commit=True)
    machine.turn(0)
    assert all(machine.model.times_accepted())
