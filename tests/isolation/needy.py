"""Tests that need servers without naming them, for ``test_needs``; by itself pytest has none."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.tiers import BROKERS, DATABASES

CLIENT = Client


def test_alone() -> None:
    pass


def test_on_each(alias: str) -> None:
    pass


@pytest.mark.django_db(databases=["default", min(DATABASES)])
def test_on_two() -> None:
    pass


@pytest.mark.parametrize("broker", ["memory", min(BROKERS)])
def test_with_a_broker(broker: str, request: pytest.FixtureRequest) -> None:
    if broker != "memory":
        request.getfixturevalue(f"{broker}_url")
