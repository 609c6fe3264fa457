"""Each capability with the apps that it needs, in two orders of INSTALLED_APPS."""

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
#: By part, a table of the overview, a metric, and a key of the status if it has one.
SHOWN = {
    "events": ("Subscriptions", "outbox_subscription_state", "subscriptions"),
    "entities": ("Entities", "outbox_entity_waiting", ""),
    "prepared": ("Prepared events", "outbox_prepared_events", "prepared"),
}
#: The overview of all apps, below its headline.
OVERVIEW = [
    *("Ready", "Oldest ready", "Staged to published", "Published per minute", "Dead"),
    *("Subscriptions behind", "Open gaps", "Undecided"),
    *("Ready jobs, last hour", "Jobs per minute, last hour"),
    *("Ready jobs, last day", "Jobs per minute, last day", "Events per minute, last hour"),
    *("What blocks", "Drainers", "Dead jobs"),
    *("Held jobs, by when they are due", "Subscriptions", "Open gaps", "Entities"),
    *("Prepared events", "Latest incidents"),
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


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize(("apps", "parts"), ROWS.items(), ids=ROWS)
def test_a_row_lives_and_shows_its_parts(
    apps: str, parts: set[str], reverse: bool, found: Any
) -> None:
    """The process asserts that migrations, checks, pages, and a life of each app work."""
    row = found(apps, reverse)
    for part, (table, metric, key) in SHOWN.items():
        assert (table in row["overview"]) == (part in parts), part
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
