"""Each fault of the dictionary ``OUTBOX`` is an error that names the setting."""

from __future__ import annotations

import dataclasses
import re

import pytest
from django.apps import apps
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured

from outbox_app.capability import all_doors, capabilities, setting
from outbox_app.checks.values import LEFT, check_settings
from outbox_app.conf import KEYS_OF_APPS, outbox_settings
from outbox_app.process.lease import LeaseHolder

#: The keys of all apps.
EVERY = [
    key.name
    for doors in all_doors()
    if doors.settings
    for key in dataclasses.fields(doors.settings)
]


def ids(messages):
    return [message.id for message in messages]


def test_defaults_are_right(settings):
    del settings.OUTBOX
    assert check_settings() == []


@pytest.mark.parametrize("value", [{"BATCHSIZE": 1}, ["DATABASE"], None], ids=repr)
def test_no_dictionary_or_unknown_key(settings, value):
    settings.OUTBOX = value
    [message] = [each for each in run_checks(tags=["outbox"]) if each.is_serious()]
    assert message.id == "outbox.E001"
    if value == {"BATCHSIZE": 1}:
        said = "The setting OUTBOX has no key 'BATCHSIZE'. Did you mean 'BATCH_SIZE'?"
        assert message.msg == said


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["lease_second"], "'lease_second'. Did you mean 'LEASE_SECONDS'?"),
        (["WAKES", "SINKS"], "'SINKS', 'WAKES'. Did you mean 'SINK', 'WAKE'?"),
        (["WAKES", "MAX_BACKOFF"], "'MAX_BACKOFF', 'WAKES'. Known keys: DATABASE, "),
        ([7, "WAKE"], "7. Known keys: DATABASE, "),
    ],
)
def test_keys_that_do_not_exist(settings, keys, said):
    """Those that are near are named, and otherwise all."""
    settings.OUTBOX = dict.fromkeys(keys)
    with pytest.raises(ImproperlyConfigured) as error:
        outbox_settings()
    assert str(error.value).startswith(f"The setting OUTBOX has no key {said}")


@pytest.mark.parametrize("name", ["DATABASE", "INBOX_DATABASE"])
@pytest.mark.parametrize("value", ["nowhere", 1, ["default"]], ids=repr)
def test_unknown_alias(settings, name, value):
    settings.OUTBOX = {name: value}
    [message] = check_settings()
    assert message.id == "outbox.E002"
    assert f"OUTBOX[{name!r}]" in message.msg
    assert "'default'" in message.hint


WRONG = {
    "OUTSIDE": ["never", None, 1, ["send"]],
    "TASK_MODES": [["shop.*"], {"shop.*": "stag"}, {1: "send"}, {"": "send"}, {"shop.*": False}],
    "DEAD_KEY": ["stop", True],
    "WAKE": [0, "no"],
    "MAX_MESSAGE_BYTES": [0, -1, 1.5, "1", True, None],
    "BATCH_SIZE": [0, -1, 10.0, "1000", True],
    "INBOX_RETENTION_DAYS": [0, -1, 0.5, 365_001, 10**9],
    "EVENT_RETENTION_DAYS": [0, 10**9],
    "ADMIN_DATABASES": [("nowhere",), "default", ("default", 1)],
    "SINK": [
        *({"outbox_event": ("there", days)} for days in (0, 365_001, 1.5, True, "1")),
        *({"outbox_event": each} for each in (("", 1), (1, 1), ("there",), 5)),
        *({1: ("there", 1)}, ("outbox_event",)),
    ],
    "ENTITY_SCOPE": ["nowhere.scope", "scope", ".scope", "..a.scope", "os.sep", 1],
    "ENTITY_COMMAND_DAYS": [0, -1, 0.5],
    "LEASE_SECONDS": [0, -1, "10", True, float("nan"), float("inf")],
    "PUBLISH_TIMEOUT": [0, -0.1, None],
    "INTERVAL": [0, 0.001, -1, "1", float("nan")],
    "SUBSCRIPTION_INTERVAL": [0, 0.001, "1"],
    "HOLD_HORIZON": [-1, 1e15, float("nan"), float("inf"), "300"],
    "SENSITIVE_KEYS": ["password", None, [1], ("",), ["token", "-"], {"token"}],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in WRONG.items()
        for value in values
    ],
)
def test_value_that_makes_no_sense(settings, name, value):
    settings.OUTBOX = {name: value}
    [message] = check_settings()
    assert message.id == "outbox.E003"
    assert message.msg.startswith(f"OUTBOX[{name!r}] is {value!r}; expected ")
    settings.OUTBOX = {}
    assert repr(setting(name)) in message.hint


@pytest.mark.parametrize(
    "value",
    [
        {"INTERVAL": 0.01, "LEASE_SECONDS": 30, "PUBLISH_TIMEOUT": 20.5},
        {"HOLD_HORIZON": 0},
        {"OUTSIDE": "refuse", "DEAD_KEY": "block", "WAKE": False, "DATABASE": "default"},
        {"MAX_MESSAGE_BYTES": 1, "BATCH_SIZE": 1},
        {"INBOX_RETENTION_DAYS": 365_000},
        {"SINK": {"outbox_event": ["there", 1]}},
        {"SINK": {"outbox_event": ("there", 365_000)}},
        {"ADMIN_DATABASES": ["default"], "ENTITY_SCOPE": "os.getpid"},
        {"PREPARED_MAX_DECIDE_BY": 60},
        {"SENSITIVE_KEYS": ["password", "ключ"]},
        {"SENSITIVE_KEYS": ()},
        {"DATACENTRE": 0},
        {"DATACENTRE": 7},
    ],
)
def test_value_that_makes_sense(settings, value):
    settings.OUTBOX = value
    assert check_settings() == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"BATCH_SIZE": 0}, "OUTBOX['BATCH_SIZE'] is 0; expected an integer of at least 1."),
        (
            {"IMMEDIATE_HOLD": float("inf")},
            "is inf; expected a number above 0 and at most 1000000000.",
        ),
        ({"HOLD_HORIZON": 1e15}, "expected a number of at least 0 and at most 1000000000."),
        ({"INBOX_RETENTION_DAYS": 0}, "expected an integer of at least 1 and at most 365000."),
        (
            {"PUBLISH_TIMEOUT": 7.5},
            "OUTBOX['PUBLISH_TIMEOUT'] is 7.5 seconds, too long for LEASE_SECONDS of 10: ",
        ),
    ],
)
def test_what_is_said(settings, value, said):
    settings.OUTBOX = value
    [message] = check_settings()
    assert said in message.msg


def test_all_faults_are_named_at_once(settings):
    settings.OUTBOX = {"DATABASE": "x", "BATCH_SIZE": 0, "WAKE": "x"}
    assert sorted(ids(check_settings())) == ["outbox.E002", "outbox.E003", "outbox.E003"]


def test_every_setting_has_a_rule(settings):
    """A setting of a new type fails here, not in a project."""
    settings.OUTBOX = dict.fromkeys(EVERY, object())
    assert len(check_settings()) == len(EVERY)


@pytest.mark.parametrize(("timeout", "fits"), [(7.0, True), (7.1, False), (10.0, False)])
def test_lease_is_longer_than_the_publish_timeout(settings, timeout, fits):
    settings.OUTBOX = {"LEASE_SECONDS": 10.0, "PUBLISH_TIMEOUT": timeout}
    messages = check_settings()
    assert ids(messages) == ([] if fits else ["outbox.E004"])
    if not fits:
        assert "OUTBOX['PUBLISH_TIMEOUT']" in messages[0].msg


@pytest.mark.parametrize("timeout", [7.1, 8.0, 10.0, 14.0])
def test_the_lease_that_is_advised_is_long_enough(settings, timeout):
    settings.OUTBOX = {"LEASE_SECONDS": 10.0, "PUBLISH_TIMEOUT": timeout}
    [message] = check_settings()
    advised = float(re.search(r"LEASE_SECONDS to at least ([\d.]+)\.", message.hint)[1])
    settings.OUTBOX = {"LEASE_SECONDS": advised, "PUBLISH_TIMEOUT": timeout}
    assert check_settings() == []


def test_rule_of_the_lease_is_that_of_the_drain():
    """Just before its next heartbeat is due a drainer still trusts its lease for so long."""
    now = 100.0
    holder = LeaseHolder(using="default", lease_seconds=10, clock=lambda: now)
    holder._beaten_at = now
    now += 10 / 5 - 1e-6
    assert not holder.beat_is_due()
    assert holder.remaining >= LEFT * 10
    now += 1e-3
    assert holder.remaining < LEFT * 10


@pytest.mark.parametrize(("hold", "found"), [(0.8, []), (0.7, ["outbox.E047"])])
def test_a_publish_right_after_the_commit_ends_well_before_its_hold(settings, hold, found):
    settings.OUTBOX = {"IMMEDIATE_TIMEOUT": 0.2, "IMMEDIATE_HOLD": hold}
    assert ids(check_settings()) == found


def test_a_key_of_an_app_that_is_not_installed_names_the_app(settings, monkeypatch):
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "outbox_app.ids")
    settings.OUTBOX = {"DATACENTRE": 1}
    with pytest.raises(ImproperlyConfigured) as raised:
        outbox_settings()
    assert str(raised.value) == (
        "The setting OUTBOX has 'DATACENTRE' of outbox_app.ids: add 'outbox_app.ids' to "
        "INSTALLED_APPS, or remove the key."
    )
    settings.OUTBOX = {"DATACENTER": 1}
    with pytest.raises(ImproperlyConfigured, match="Did you mean 'DATACENTRE'"):
        outbox_settings()


def test_the_core_knows_the_keys_of_each_app():
    found = {
        app.name: tuple(key.name for key in dataclasses.fields(app.doors.settings))
        for app in capabilities()
        if app.doors.settings and app.name != "outbox_app"
    }
    assert {name: sorted(keys) for name, keys in found.items()} == {
        name: sorted(keys) for name, keys in KEYS_OF_APPS.items()
    }


def test_before_the_apps_are_ready_the_keys_of_all_apps_are_known(settings, monkeypatch):
    settings.OUTBOX = {"PAGE_SIZE": 7}
    monkeypatch.setattr(apps, "apps_ready", False)
    monkeypatch.setattr(apps, "is_installed", None)
    assert outbox_settings().BATCH_SIZE == 1000
    settings.OUTBOX = {"BATCHSIZE": 5}
    with pytest.raises(ImproperlyConfigured, match="has no key 'BATCHSIZE'"):
        outbox_settings()
