"""What a subscription may be, and what is refused when it is declared."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command

from outbox_app import subscriber
from outbox_app.delivery.subscriber import subscriber_named
from outbox_app.exceptions import InvalidSubscriber, UnknownLog, UnknownSubscription
from outbox_app.models import Event, EventLog


def handle(events):
    """Do nothing."""


def no_argument():
    """Cannot be called with events."""


def two_arguments(event, context):
    """Cannot be called with events."""


def keywords_only(*, events):
    """Cannot be called with events."""


async def coroutine(events):
    """Nobody would await it."""


def generator(events):
    """Nobody would iterate over it."""
    yield


def with_default(events, using="default"):
    """Can be called."""


class Handler:
    def method(self, events):
        """Can be called."""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (no_argument, "one argument"),
        (two_arguments, "one argument"),
        (keywords_only, "one argument"),
        (coroutine, "plain function"),
        (generator, "plain function"),
        (5, "not callable"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_handler_that_cannot_be_called(wrong, says):
    with pytest.raises(InvalidSubscriber, match=says):
        subscriber("x")(wrong)
    with pytest.raises(UnknownSubscription):
        subscriber_named("x")


@pytest.mark.parametrize("right", [with_default, Handler().method, list.clear, handle])
def test_a_handler_that_can(right):
    assert subscriber("x")(right) is right
    assert subscriber_named("x").handle == right


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "x" * 81},
        {"name": "a\nb"},
        {"name": 5},
        {"types": "order.*"},
        {"types": [1]},
        {"types": [""]},
        {"topics": "eu"},
        {"logs": []},
        {"logs": [Event, "outbox_app.Event"]},
        {"logs": [EventLog]},
        {"partitions": 0},
        {"partitions": 1025},
        {"partitions": True},
        {"partitions": "4"},
        {"on_error": "ignore"},
        {"start": "end"},
        {"batch_size": 0},
        {"on_gap": "wait"},
        {"max_backtracks": -1},
        {"task": handle},
    ],
    ids=str,
)
def test_nonsense_is_refused(options):
    with pytest.raises(InvalidSubscriber):
        subscriber(**{"name": "x", **options})(handle)


def test_two_subscriptions_with_one_name():
    subscriber("x")(handle)
    subscriber("x")(handle)  # its module was imported twice
    with pytest.raises(InvalidSubscriber, match=r"handle and .*with_default"):
        subscriber("x")(with_default)


def test_a_log_that_is_not_there():
    subscriber("x", logs=["shop.Nothing"])(handle)
    with pytest.raises(UnknownLog, match=r"shop\.Nothing.*outbox_event"):
        _ = subscriber_named("x").using


def test_the_command_says_what_is_wrong():
    with pytest.raises(CommandError, match="No subscription is named 'nobody'"):
        call_command("run_subscriptions", "nobody")
    with pytest.raises(CommandError, match="--batch-size must be at least 1"):
        call_command("run_subscriptions", batch_size=0)
    subscriber("x", logs=["shop.Nothing"])(handle)
    with pytest.raises(CommandError, match=r"no log 'shop\.Nothing'"):
        call_command("run_subscriptions", "x")
