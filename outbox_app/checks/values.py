"""The dictionary ``OUTBOX``: its keys and types, and values that contradict each other.

All errors are reported at once. The expected types are those of the dataclasses in ``conf`` of
each app, so a new setting is checked as soon as it is declared; ``metadata`` of a field may have a
rule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

from ..capability import all_doors
from ..conf import BEATS, MAX_DAYS, OutboxSettings, Rule, outbox_settings, read
from ..jobs.staging.calls import MODES
from ..process.lease import TRUST

#: The largest integer, by the unit at the end of a setting's name. Others have no limit.
MOST = {"DAYS": MAX_DAYS}
#: The largest number of seconds, thirty years: far larger ones overflow Python's times.
MOST_SECONDS = 10**9
#: The least value of a number, if it is not just "above 0".
LEAST = {"HOLD_HORIZON": 0, "INTERVAL": 0.01, "SUBSCRIPTION_INTERVAL": 0.01}
#: The part of the lease that is certain to be left when a batch is published.
LEFT = TRUST - 1 / BEATS
#: Timeouts: the part of another setting that each must not exceed, and what would happen if it did.
TIMEOUTS = (
    ("PUBLISH_TIMEOUT", LEFT, "LEASE_SECONDS", "outbox.E004",
     "a drainer could lose its shards while it publishes, so it publishes nothing"),
    ("IMMEDIATE_TIMEOUT", 1 / 4, "IMMEDIATE_HOLD", "outbox.E047",
     "a drainer could publish a job while the process that staged it still does"),
)  # fmt: skip


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for keys in (doors.settings for doors in all_doors() if doors.settings):
        try:
            conf = read(keys)
        except ImproperlyConfigured as error:
            hint = "Correct the key, or leave it out: each has a default."
            return [Error(str(error), hint=hint, id="outbox.E001")]
        rules = {each.name: each.metadata.get("rule") for each in fields(keys)}
        for name, hint in get_type_hints(keys).items():
            found += _check_value(keys, name, getattr(conf, name), hint, rules[name])
    return found or list(_check_timeouts(outbox_settings()))


def _check_value(
    keys: Any, name: str, value: Any, hint: Any, rule: Rule | None
) -> list[CheckMessage]:
    if name.endswith("DATABASE"):
        if value is None or value in list(connections):
            return []
        known = ", ".join(map(repr, connections))
        text = f"OUTBOX[{name!r}] is {value!r}, which is not an alias of DATABASES."
        return [Error(text, hint=f"Write one of {known}, or None.", id="outbox.E002")]
    if rule:
        expected = None if rule.fits(value) else rule.expected
    else:
        expected = _expected(name, value, hint)
    if expected is None:
        return []
    text = f"OUTBOX[{name!r}] is {value!r}; expected {expected}."
    default = getattr(keys(), name)
    return [Error(text, hint=f"Remove the key to use the default, {default!r}.", id="outbox.E003")]


def _expected(name: str, value: Any, hint: Any) -> str | None:
    if type(None) in get_args(hint):
        [hint] = [each for each in get_args(hint) if each is not type(None)]
        expected = _expected(name, value, hint)
        return None if value is None or not expected else f"{expected}, or None"
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return None if value in choices else f"one of {', '.join(map(repr, choices))}"
    if hint is bool:
        return None if isinstance(value, bool) else "True or False"
    if hint is int:
        most = MOST.get(name.rpartition("_")[2], math.inf)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return None
        return "an integer of at least 1" + (f" and at most {most}" if most < math.inf else "")
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        above = f"of at least {LEAST[name]}" if name in LEAST else "above 0"
        fits = number and LEAST.get(name, 0) <= value <= MOST_SECONDS and (value or name in LEAST)
        return None if fits else f"a number {above} and at most {MOST_SECONDS}"
    if hint is str:
        return None if _is_function(value) else "the dotted path of a function"
    if name == "TASK_MODES":
        fits = isinstance(value, dict) and all(
            isinstance(pattern, str) and pattern and mode in MODES
            for pattern, mode in value.items()
        )
        modes = MODES if apps.is_installed("outbox_app.shadow") else MODES[:2]
        known = " or ".join(map(repr, modes))
        return None if fits else f"a dictionary of patterns, each with {known}"
    if name == "ADMIN_DATABASES":
        fits = isinstance(value, tuple | list) and all(each in list(connections) for each in value)
        return None if fits else f"a tuple of aliases: {', '.join(map(repr, connections))}"
    if get_origin(hint) is tuple:
        texts = isinstance(value, tuple | list) and all(isinstance(v, str) for v in value)
        fits = texts and all(any(map(str.isalnum, v)) for v in value)
        return None if fits else "a tuple of names, each with a letter or digit in it"
    raise NotImplementedError(f"outbox_app.checks: no rule for {name}: {hint}")


def _is_function(path: Any) -> bool:
    try:
        return callable(import_string(path))
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def _check_timeouts(conf: OutboxSettings) -> Iterator[CheckMessage]:
    for name, part, limit, id, effect in TIMEOUTS:
        timeout, whole = getattr(conf, name), getattr(conf, limit)
        if timeout > part * whole:
            least = math.ceil(round(10 * timeout / part, 6)) / 10  # never rounded down
            yield Error(
                f"OUTBOX[{name!r}] is {timeout:g} seconds, too long for {limit} of {whole:g}: "
                f"{effect}.",
                hint=f"Set {name} to at most {part * whole:g}, or {limit} to at least {least:g}.",
                id=id,
            )
