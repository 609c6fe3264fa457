"""Prometheus's rules fire, and the queries of Grafana's dashboard are valid and use our metrics."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from outbox_app.metrics import all_metrics

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
ALERTS = HOWTO / "outbox-alerts.yaml"
BOARD: dict[str, Any] = json.loads((HOWTO / "outbox-dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]

LOOK = "see the overview, or manage.py outbox_status."
#: The rule that has to fire, for what a scrape says, and with which words.
FIRING = [
    ("OutboxCannotBeAsked", "outbox_up", {}, 0, "The outbox's database does not answer."),
    (
        "OutboxHasAProblem",
        *("outbox_problem", {"code": "dead", "severity": "bad"}, 1, f"dead: {LOOK}"),
    ),
    (
        "OutboxHasAWarning",
        *("outbox_problem", {"code": "late", "severity": "warning"}, 1, f"late: {LOOK}"),
    ),
    ("OutboxIsLate", "outbox_oldest_ready_seconds", {}, 61, "Jobs have waited for 1m 1s."),
    (
        "OutboxHasDeadJobs",
        *("outbox_dead_jobs", {}, 2, "2 jobs are dead. Requeue or discard them."),
    ),
    (
        "OutboxManyTakeovers",
        *("outbox_incidents", {"kind": "takeover"}, 21, "21 incidents (takeover) in 24 hours."),
    ),
    (
        "OutboxSubscriptionHasStopped",
        "outbox_subscription_state",
        *({"subscription": "a", "state": "failing"}, 1, "a is failing."),
    ),
    (
        "OutboxSubscriptionIsLate",
        *("outbox_subscription_oldest_seconds", {"subscription": "a"}, 301, "a is 5m 1s behind."),
    ),
]


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("expression", [*(rule["expr"] for rule in RULES), *QUERIES])
def test_metrics_and_labels_exist(expression: str) -> None:
    named = re.findall(r"\boutbox_\w+", expression)
    assert named
    assert set(named) <= set(all_metrics())
    for name, labels in re.findall(r"(outbox_\w+)\{(.*?)\}", expression):
        for label in re.findall(r"(\w+)=", labels):
            assert label in {"database", *all_metrics()[name].labels}


def test_every_rule_fires(tmp_path: Path) -> None:
    """As ``promtool test rules`` sees them, an hour into what is wrong."""
    severity = {rule["alert"]: rule["labels"] for rule in RULES}
    assert [name for name, *_ in FIRING] == list(severity)
    series, fired = [], []
    for name, metric, labels, value, summary in FIRING:
        given = ",".join(f'{label}="{text}"' for label, text in labels.items())
        series.append({"series": f"{metric}{{{given}}}", "values": f"{value}x120"})
        expected = {
            "exp_labels": {**labels, **severity[name]},
            "exp_annotations": {"summary": summary},
        }
        fired.append({"alertname": name, "eval_time": "1h", "exp_alerts": [expected]})
    group = {"interval": "1m", "input_series": series, "alert_rule_test": fired}
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [group]}))
    promtool("check", "rules", str(ALERTS))
    promtool("test", "rules", str(file))


def test_each_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$database", ".*")}
        for number, query in enumerate(QUERIES)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(file))


def test_the_dashboard_asks_for_its_data_source_and_has_no_panel_twice() -> None:
    assert [each["name"] for each in BOARD["__inputs"]] == ["DS_PROMETHEUS"]
    panels = BOARD["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {"${DS_PROMETHEUS}"}
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells))
