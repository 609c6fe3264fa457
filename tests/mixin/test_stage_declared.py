"""``stage_declared()``: for changes that send no signal."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.exceptions import InvalidJob, NotAtomic
from outbox_app.models import StagedJob
from outbox_app.testing import staged_jobs
from tests.mixin.models import Order, Wrong


def created(orders, using):
    """Create rows, and return them with their ids: MySQL does not tell these, so read it again."""
    rows = Order.objects.using(using).bulk_create(orders)
    return list(Order.objects.using(using).order_by("pk")) if rows[0].pk is None else rows


@pytest.mark.slow
def test_bulk_create(alias, app):
    with transaction.atomic(using=alias):
        orders = created([Order() for _ in range(2500)], alias)
        with CaptureQueriesContext(connections[alias]) as queries:
            assert Order.stage_declared("create", orders) == 2500

    inserts = [q["sql"] for q in queries if q["sql"].startswith(("INSERT", "COPY"))]
    if connections[alias].features.max_query_params is None:
        assert len(inserts) == 3
    else:  # SQLite takes about 100 rows at once
        assert len(inserts) < 30
    assert [job.args for job in staged_jobs(using=alias)] == [[order.pk] for order in orders]


@pytest.mark.usefixtures("in_atomic")
def test_queryset_update(alias, app, staged):
    Order.objects.using(alias).bulk_create([Order(), Order()])
    Order.objects.using(alias).update(paid=True)
    orders = Order.objects.using(alias).order_by("pk")

    assert Order.stage_declared("update", orders) == 2
    assert staged() == [("mixin.updated", [order.pk]) for order in orders]
    assert staged_jobs(using=alias)[0].ordering_key == f"mixin.order:{orders[0].pk}"


@pytest.mark.usefixtures("in_atomic")
def test_conditions_hold_and_nothing_is_nothing(alias, app, staged):
    Order.objects.using(alias).bulk_create([Order(), Order(paid=True)])
    assert Order.stage_declared("update", Order.objects.using(alias).all()) == 1
    assert Order.stage_declared("update", []) == 0
    assert len(staged()) == 1


@pytest.mark.usefixtures("in_atomic")
def test_a_row_without_a_primary_key_is_refused(alias, app, staged):
    """As MySQL leaves it after bulk_create(): the task would be called with None."""
    with pytest.raises(InvalidJob, match=r"mixin\.Order: a row has no primary key"):
        Order.stage_declared("create", [Order()], using=alias)
    assert staged() == []


@pytest.mark.usefixtures("in_atomic")
def test_all_or_nothing(alias, app):
    with pytest.raises(InvalidJob):
        Wrong.stage_declared("create", [Wrong(pk=1)], using=alias)

    def orders():
        yield from created([Order() for _ in range(1100)], alias)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Order.stage_declared("create", orders())
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.django_db(transaction=True)
def test_needs_a_transaction(alias, app):
    orders = created([Order()], alias)
    with pytest.raises(NotAtomic, match=alias):
        Order.stage_declared("create", orders)


def test_change_has_three_names(alias, app):
    with pytest.raises(ValueError, match="'created'"):
        Order.stage_declared("created", [])
