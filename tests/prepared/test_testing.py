"""In a plain ``TestCase``, leaving the block counts as the commit; events can be asserted."""

from __future__ import annotations

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.models import Group
from django.db import transaction
from django.test import TestCase, override_settings

from outbox_app.events.testing import assert_published
from outbox_app.prepared import aconfirm, aprepare, confirm, fence, prepare, prepared
from outbox_app.prepared.exceptions import FencedOut
from outbox_app.prepared.models import Fence
from outbox_app.prepared.sender import Prepared
from outbox_app.prepared.testing import assert_confirmed, assert_prepared
from tests.servers.mysql import MARIADB

PAID = ("order.paid", {"total": 30})


class Steps:
    """The same test for each pair of databases: the keeper's, the sender's."""

    keeper = "default"

    def setUp(self) -> None:
        if self.keeper not in settings.DATABASES or self.sender not in settings.DATABASES:
            self.skipTest("the servers are not there")
        override = override_settings(OUTBOX={**settings.OUTBOX, "DATABASE": self.keeper})
        override.enable()
        self.addCleanup(override.disable)

    def test_leaving_the_block_is_the_commit(self) -> None:
        with prepared("order-17", *PAID, using=self.sender):
            Group.objects.using(self.sender).create(name="business")
            assert_prepared(*PAID, stream="order-17", state="prepared")
            assert_confirmed(*PAID, count=0)
        [row] = assert_confirmed(*PAID, stream="order-17")
        [event] = assert_published(*PAID, using=self.keeper)
        assert event.message_id == row.event_id
        assert row.sender == f"alias:{self.sender}"

    def test_inside_a_transaction_of_the_code(self) -> None:
        with transaction.atomic(using=self.sender):
            event = prepare("order-17", *PAID, using=self.sender)
            fence(event)
            Group.objects.using(self.sender).create(name="business")
        confirm(event)
        assert_confirmed(*PAID)

    def test_an_error_is_the_rollback(self) -> None:
        def fail() -> None:
            with prepared("order-17", *PAID, using=self.sender):
                Group.objects.using(self.sender).create(name="business")
                raise ValueError("no money")

        with pytest.raises(ValueError, match="no money"):
            fail()
        assert not Group.objects.using(self.sender).exists()
        assert_prepared(*PAID, state="cancelled")
        assert_published(*PAID, count=0, using=self.keeper)

    def test_without_a_fence_nothing_is_confirmed(self) -> None:
        event = prepare("order-17", *PAID, using=self.sender)
        with pytest.raises(FencedOut):
            confirm(event)
        assert_prepared(*PAID, state="prepared")

    async def test_by_steps_in_a_coroutine(self) -> None:
        event = await aprepare("order-17", *PAID, using=self.sender)
        await sync_to_async(self._pay)(event)
        await aconfirm(event)
        await sync_to_async(assert_confirmed)(*PAID)
        await sync_to_async(assert_published)(*PAID, using=self.keeper)

    def _pay(self, event: Prepared) -> None:
        with transaction.atomic(using=self.sender):
            fence(event)
            Group.objects.using(self.sender).create(name="business")

    def test_nothing_is_left(self) -> None:
        assert not Group.objects.using(self.sender).exists()
        assert not Fence.objects.using(self.sender).exists()
        assert_prepared("order.paid", count=0)


class KeptOnSQLite(Steps, TestCase):
    sender = "postgres"
    databases = frozenset({"default", "postgres"} & {*settings.DATABASES})


class KeptOnPostgreSQL(Steps, TestCase):
    keeper, sender = "postgres", MARIADB
    databases = frozenset({"postgres", MARIADB} & {*settings.DATABASES})


class KeptOnMariaDB(Steps, TestCase):
    keeper, sender = MARIADB, "default"
    databases = frozenset({MARIADB, "default"} & {*settings.DATABASES})


@pytest.mark.any_database
@pytest.mark.django_db(databases="__all__")
def test_what_was_prepared_is_listed_where_it_is_another(alias: str) -> None:
    with pytest.raises(AssertionError, match="Nothing was prepared"):
        assert_prepared("order.paid")
    others = [each for each in settings.DATABASES if each != alias]
    if not others:
        pytest.skip("the servers are not there")
    with prepared("order-17", *PAID, using=others[0]):
        pass
    with pytest.raises(AssertionError) as error:
        assert_prepared("order.paid", {"total": 31})
    assert str(error.value).startswith("Expected 1 prepared of order.paid; found 0.\nPrepared:\n")
    assert "order.paid order-17 confirmed" in str(error.value)
    with pytest.raises(AssertionError, match=r"Expected 2 confirmed of order\.paid; found 1"):
        assert_confirmed("order.paid", count=2)
