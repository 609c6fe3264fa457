"""Each capability with the apps that it needs, and all in two orders of INSTALLED_APPS."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from tests.apps.processes import run

pytestmark = pytest.mark.system

ALL = "core events entities prepared door fleet ids django_tasks shadow pipeline"
#: By installed apps, the parts that the overview, the status and the metrics show beyond jobs.
ROWS = {
    "core": set(),
    "core events": {"events"},
    "core events entities": {"events", "entities"},
    "core events prepared": {"events", "prepared"},
    "core events prepared door": {"events", "prepared"},
    "core events pipeline": {"events"},
    "core ids": set(),
    "core django_tasks": set(),
    "core shadow": set(),
    ALL: {"events", "entities", "prepared"},
}
#: By part, a table of the overview that has rows, a metric, and a key of the status, if there are.
SHOWN = {
    "events": ("Subscriptions", "outbox_subscription_state", "subscriptions"),
    "entities": ("", "outbox_entity_waiting", ""),
    "prepared": ("", "outbox_prepared_events", "prepared"),
}
#: The overview of all apps, below its headline. What has nothing to show is left out.
OVERVIEW = [
    *("Ready", "Staged to published", "Published per minute", "Dead", "Subscriptions behind"),
    *("Ready jobs, last hour", "Ready jobs, last day", "Events per minute, last hour"),
    "Subscriptions",
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """``found(apps, reverse)``: what ``tests.apps.shop.row`` found, in a process of its own."""

    @lru_cache
    def found(apps: str, reverse: bool = False) -> dict[str, Any]:
        others = {"PYTHONWARNINGS": "error", **({"SHOP_REVERSED": "1"} if reverse else {})}
        folder = tmp_path_factory.mktemp("row")
        done = run("-m", "tests.apps.shop.row", apps=apps, folder=folder, **others)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return found


#: All apps in the other order have each pair of apps in the other order.
@pytest.mark.parametrize(
    ("apps", "reverse"),
    [*((apps, False) for apps in ROWS), (ALL, True)],
    ids=lambda value: {True: "reversed", False: "in order"}.get(value, value),
)
def test_a_row_lives_and_shows_its_parts(apps: str, reverse: bool, found: Any) -> None:
    """The process asserts that migrations, checks, pages, and a life of each app work."""
    row, parts = found(apps, reverse), ROWS[apps]
    for part, (table, metric, key) in SHOWN.items():
        assert (table in row["overview"]) == (part in parts and bool(table)), part
        assert (metric in row["metrics"]) == (part in parts), part
        assert (key in row["status"]) == (part in parts and bool(key)), part


def test_all_apps_are_shown_in_one_order(found: Any) -> None:
    """Whatever the order of INSTALLED_APPS is: the headline, too, which names one problem of two.

    No drainer runs, and the subscription is behind.
    """
    row, reversed = found(ALL), found(ALL, True)
    assert {each["code"] for each in row["health"]["problems"]} == {"no_drainer", "subscription"}
    assert row["overview"][0].startswith("Nothing is being sent: no drainer is running.")
    assert row["overview"][1:] == OVERVIEW
    assert reversed["overview"] == row["overview"]
    assert list(reversed["status"]) == list(row["status"])
    assert reversed["entries"] == row["entries"]
    assert next(iter(reversed["entries"])) == "outbox_app"
