"""``assert_staged()`` and similar helpers: the jobs that they find, and their failure messages."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from unittest.mock import ANY
from uuid import uuid4

import pytest
from kombu.exceptions import ContentDisallowed

from outbox_app import stage, stage_many
from outbox_app.models import StagedJob
from outbox_app.testing import LISTED, assert_not_staged, assert_staged, staged_jobs
from tests import tasks

pytestmark = pytest.mark.usefixtures("in_atomic")


def test_finds_by_task_arguments_and_key(alias, add):
    stage(add, (1, 2), using=alias, ordering_key="k")
    stage(add, (1,), {"y": 3}, using=alias)

    assert len(assert_staged(add, count=2)) == 2
    [job] = assert_staged("add", args=(1, 2), kwargs={}, ordering_key="k")
    assert (job.args, job.kwargs, job.ordering_key, job.eta) == ([1, 2], {}, "k", None)
    assert_staged(add, args=[1], kwargs={"y": 3}, ordering_key="")
    assert_staged(add, args=(1, ANY))
    assert_not_staged(add, args=(2, 1))
    assert_not_staged(add, kwargs={"y": 4})
    assert_not_staged(add, ordering_key="other")
    assert_not_staged("subtract")


def test_a_signature_is_refused_as_its_arguments_would_not_be_compared(alias, add):
    stage(add, (1, 2), using=alias)
    for look in (assert_staged, assert_not_staged, staged_jobs):
        with pytest.raises(TypeError, match=r"Give the task of add\(3, 4\), and .* as args="):
            look(add.s(3, 4))


def test_arguments_may_be_an_iterator(alias, add):
    """It is read once, and compared with every job."""
    stage(add, (0, 0), using=alias)
    stage(add, (1, 2), using=alias)
    assert_staged(add, args=iter([1, 2]))
    with pytest.raises(AssertionError, match=re.escape("0 staged of add with args=(1, 2)")):
        assert_not_staged(add, args=iter([1, 2]))


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3])),
        {"a": (1,)},
        uuid4(),
        datetime(2030, 1, 2, tzinfo=UTC),
        Decimal("1.10"),
        "ü\x00",
    ],
    ids=lambda value: type(value).__name__,
)
def test_arguments_compare_as_the_message_holds_them(add, alias, value):
    stage(add, (value, 0), using=alias)
    assert_staged(add, args=(value, 0))
    assert_not_staged(add, args=(object(), 0))


def test_failure_lists_what_is_staged(alias, app, add):
    stage(add, (1, 2), using=alias, ordering_key="k")
    eta = datetime.now(UTC) + timedelta(minutes=1)
    stage(add, (1,), {"y": "z"}, using=alias, eta=eta, queue="q")

    with pytest.raises(AssertionError) as caught:
        assert_staged(add, args=(1, 3), ordering_key="k")
    assert str(caught.value).splitlines() == [
        "Expected 1 staged of add with args=(1, 3), ordering_key='k'; found 0.",
        f"Staged on {alias!r}:",
        f"  add(1, 2) queue={app.main!r} ordering_key='k'",
        f"  add(1, y='z') queue='q' eta={eta.isoformat()}",
    ]


def test_failure_says_that_nothing_is_staged_or_lists_a_part(alias, add):
    with pytest.raises(AssertionError, match=f"Nothing is staged on {alias!r}"):
        assert_staged(add)
    assert_not_staged()

    stage_many((add.s(i, i) for i in range(LISTED + 5)), using=alias)
    with pytest.raises(AssertionError, match=re.escape("… and 5 more")):
        assert_staged(add)
    with pytest.raises(AssertionError, match="Expected nothing staged"):
        assert_not_staged()
    with pytest.raises(AssertionError, match="Expected 0 staged of add with"):
        assert_not_staged(add, args=(1, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zlib"},
        {"serializer": "pickle"},
        {"headers": {"trace": "x"}},
        {"eta": datetime.now(UTC) + timedelta(days=1)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_jobs_are_decoded(alias, make_app, options):
    app = make_app(accept_content=["json", "pickle"])
    add = app.task(name="add")(tasks.add)
    stage(add, (1, (2, 3)), using=alias, queue="q", **options)

    [job] = staged_jobs(add, using=alias)
    assert (job.task, job.queue, job.kwargs) == ("add", "q", {})
    assert_staged(add, args=(1, (2, 3)))
    assert job.eta == options.get("eta")
    assert job.headers.get("trace") == options.get("headers", {}).get("trace")
    assert job.task_id == StagedJob.objects.using(alias).get().task_id


def test_what_a_worker_would_refuse_is_refused(alias, add):
    stage(add, (1, 2), using=alias, serializer="pickle")
    with pytest.raises(ContentDisallowed):
        staged_jobs(using=alias)


def test_tasks_of_a_plain_app_in_order(alias, add):
    stage_many((add.s(i, i) for i in (3, 1, 2)), using=alias)
    assert [job.args[0] for job in staged_jobs(using=alias)] == [3, 1, 2]
    assert staged_jobs("other", using=alias) == []
