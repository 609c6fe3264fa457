"""Errors can be pickled: pools, parallel tests and result backends recreate them."""

from __future__ import annotations

import copy
import inspect
import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from outbox_app.capability import capabilities
from outbox_app.events.exceptions import VersionConflict
from outbox_app.exceptions import OutboxError

FACTS: dict[str, Any] = {"VersionConflict": {"stream": "order-1", "current": 3}}
FACTS |= {"Overloaded": {"retry_after": 5}, "PeerUnavailable": {"sent": False}}
ERRORS = [
    error
    for app in capabilities()
    if find_spec(f"{app.name}.exceptions")
    for _, error in inspect.getmembers(import_module(f"{app.name}.exceptions"), inspect.isclass)
    if issubclass(error, OutboxError) and error.__module__ == f"{app.name}.exceptions"
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_is_the_same_in_another_process(error: Any) -> None:
    raised = error("Why.", **FACTS.get(error.__name__, {}))
    for made in (pickle.loads(pickle.dumps(raised)), copy.copy(raised)):
        assert (type(made), str(made), vars(made)) == (error, "Why.", vars(raised))


def test_an_error_is_made_of_its_words_alone_as_celery_makes_it() -> None:
    assert str(VersionConflict("Why.")) == "Why."
