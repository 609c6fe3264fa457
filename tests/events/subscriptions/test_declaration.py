"""Declarations of subscriptions: the valid ones, and the ones that are refused."""

from __future__ import annotations

from functools import partial
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from outbox_app.aliases import model_alias
from outbox_app.events import subscriber
from outbox_app.events.checks import check_declared_logs
from outbox_app.events.exceptions import InvalidSubscriber, UnknownLog, UnknownSubscription
from outbox_app.events.models import Event, EventLog
from outbox_app.events.projections.push import receive
from outbox_app.events.signals import events_published
from outbox_app.events.subscriptions.run import choose
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.monitoring.diagnosis import Limits, problems
from outbox_app.monitoring.status import outbox_status


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


async def asynchronous_generator(events):
    yield


def generator(events):
    """Nobody would iterate over it."""
    yield


def with_default(events, using="default"):
    """Can be called."""


class Handler:
    def method(self, events):
        """Can be called."""

    def without_self():
        """Cannot be called."""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (no_argument, "one argument"),
        (two_arguments, "one argument"),
        (keywords_only, "one argument"),
        (partial(no_argument, 1), "one argument"),
        (Handler().without_self, "one argument"),
        (coroutine, "plain function"),
        (generator, "plain function"),
        (asynchronous_generator, "plain function"),
        (5, "not callable"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_handler_that_cannot_be_called(wrong, says):
    with pytest.raises(InvalidSubscriber, match=says):
        subscriber("x")(wrong)
    with pytest.raises(UnknownSubscription):
        subscriber_named("x")


@pytest.mark.parametrize("right", [with_default, Handler().method, list.clear, max, handle])
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
        {"types": []},
        {"topics": []},
        {"types": ["*.placed"]},
        {"types": ["order.*", "a*b"]},
        {"types": ["**"]},
        {"types": ["x" * 256]},
        {"types": ["\0"]},
        {"topics": ["eu.*"]},
        {"topics": ["\ud800"]},
        {"logs": []},
        {"logs": [Event, "outbox_events.Event"]},
        {"logs": [EventLog]},
        {"logs": [5]},
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
    ids=lambda options: str(options).partition(" at 0x")[0],
)
def test_nonsense_is_refused(options):
    with pytest.raises(InvalidSubscriber):
        subscriber(**{"name": "x", **options})(handle)


def test_two_subscriptions_with_one_name():
    subscriber("x")(handle)
    subscriber("x")(handle)  # its module was imported twice
    with pytest.raises(InvalidSubscriber, match=r"handle and .*with_default"):
        subscriber("x")(with_default)


def test_two_tasks_with_one_name(make_app):
    app = make_app()
    one, other = (app.task(handle, name=name) for name in ("one", "other"))
    subscriber("x", task=one)
    subscriber("x", task=one)(handle)
    with pytest.raises(InvalidSubscriber, match=r"staging\(one\) and .*staging\(other\)"):
        subscriber("x", task=other)


def test_a_log_that_is_not_there():
    subscriber("x", logs=["shop.Nothing"])(handle)
    with pytest.raises(UnknownLog, match=r"Subscription 'x' .*shop\.Nothing.*outbox_event"):
        _ = subscriber_named("x").using


def test_where_none_can_run_it_is_said_why():
    subscriber("x", logs=["shop.Nothing"])(handle)
    with pytest.raises(UnknownLog, match=r"Subscription 'x' cannot run\."):
        choose((), None)


@pytest.mark.parametrize("types", [["*"], ["order.*", "paid"], ["x" * 255]], ids=str)
def test_types_that_match_something(types):
    for given in (types, iter(types)):
        subscriber("x", types=given)(handle)
        assert subscriber_named("x").types == tuple(types)


@pytest.mark.django_db(transaction=True)
class TestOneThatCannotRun:
    """It is named, and stops no other."""

    @pytest.fixture
    def declared(self, alias, published):
        seen = []

        @subscriber("good")
        def good(events):
            seen.extend(events)

        subscriber("bad", logs=["shop.Nothing"])(handle)
        published("a")
        return seen

    def test_others_run(self, alias, declared, caplog):
        with pytest.raises(SystemExit) as stop:
            call_command("run_subscriptions", "--once")
        assert stop.value.code == 1
        assert "Subscription left out reason=\"Subscription 'bad' cannot run." in caplog.text
        assert len(declared) == 1
        call_command("run_subscriptions", "good", "--once")
        with pytest.raises(CommandError, match="'bad' cannot run"):
            call_command("run_subscriptions", "bad", "--once")

    def test_it_is_listed(self, alias, declared):
        out = StringIO()
        call_command("outbox_subscriptions", "list", stdout=out)
        assert "Subscription 'bad' cannot run. There is no log 'shop.Nothing'" in out.getvalue()
        assert out.getvalue().count("failing") == 1
        status = outbox_status(using=alias)
        listed = status.sections["events"].subscriptions
        good, bad = [each for each in listed if each.declared][::-1]
        assert (good.error, bad.state) == ("", "failing")
        [problem] = [p for p in problems(status, Limits()) if p.code == "failing"]
        assert "bad: Subscription 'bad' cannot run" in problem.detail

    def test_it_is_checked(self, alias, declared):
        subscriber("late", logs=["shop.Nothing"], by_time=True, on_gap="skip")(handle)
        found = [(message.id, message.obj) for message in check_declared_logs()]
        assert found == [("outbox.W030", "bad"), ("outbox.W030", "late")]

    def test_events_are_published_as_before(self, alias, declared, published):
        class Pushed:
            push = True
            __qualname__ = "Pushed"

            def __call__(self, events):
                raise AssertionError

        subscriber("pushed", logs=["shop.Nothing"])(Pushed())
        events_published.connect(receive)
        published("b")


def test_the_command_says_what_is_wrong():
    with pytest.raises(CommandError, match="No subscription is named 'nobody'"):
        call_command("run_subscriptions", "nobody")
    with pytest.raises(CommandError, match="--batch-size must be at least 1"):
        call_command("run_subscriptions", batch_size=0)
    subscriber("there")(handle)
    with pytest.raises(CommandError, match=f"is on 'direct': .* of its logs, {model_alias(Event)}"):
        call_command("run_subscriptions", "--database", "direct")
    subscriber("x", logs=["shop.Nothing"])(handle)
    with pytest.raises(CommandError, match=r"no log 'shop\.Nothing'"):
        call_command("run_subscriptions", "x")
