"""Code that ends its transaction is found out, whatever else it does."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.exceptions import TransactionEnded
from outbox_app.process.enclosure import enclosed


@pytest.mark.django_db(transaction=True)
def test_code_that_has_ended_its_transaction_may_raise_anything(alias: str) -> None:
    def end_and_raise() -> None:
        with transaction.atomic(using=alias), enclosed("It", using=alias):
            connections[alias].connection.cursor().execute("COMMIT")
            raise ValueError({"not": "hashable"})

    with pytest.raises(TransactionEnded, match="It ended its transaction"):
        end_and_raise()
