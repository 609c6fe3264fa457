"""Histories of innocents that the judge must not blame, and broken promises that it must see."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.history import PROMISES, Record, judge

from .test_judge import command, event, handled, incident, published, record, staged
from .test_judge import version as kept

committed = {n: record("commit", transaction=n) for n in (1, 2)}
COMMITS = [record("commit", (2, 2), transaction=1), record("commit", (4, 4), transaction=2)]
BOTH = [
    staged("a", 1, row=1, key="k", transaction=1),
    staged("b", 3, row=2, key="k", transaction=2),
]

INNOCENT: dict[str, tuple[str, list[Record]]] = {
    "an id whose outcome was unknown is repeated after another command": (
        "P9",
        [
            command("c", (1, 2), "unknown"),
            command("d", (3, 4), version=2),
            command("c", (5, 6), version=1),
            *(kept(1, "c"), kept(2, "d")),
        ],
    ),
    "the repetition is in the file that is read first": (
        "P9",
        [
            command("c", (5, 6), version=1),
            command("c", (1, 2), version=1),
            command("d", (3, 4), version=2),
            *(kept(1, "c"), kept(2, "d")),
        ],
    ),
    "a handler that raised is run again": (
        "P8",
        [
            event(1, version=1),
            record("handle", outcome="failed", subscription="shop", position=1),
            *handled(1),
        ],
    ),
    "a handler's COMMIT without a reply is run again": (
        "P8",
        [
            event(1, version=1),
            record("handle", outcome="unknown", subscription="shop", position=1),
            *handled(1),
        ],
    ),
    "an event that was refused, in a transaction that went on": (
        "P8",
        [
            *(event(1, version=1), committed[1], *handled(1)),
            event(2, outcome="failed", version=1, transaction=1),
        ],
    ),
    "an event was inserted before another one, and committed after it": (
        "P8",
        [
            event(1, (1, 2), version=1, transaction=1),
            event(2, (5, 6), stream="t", version=1, transaction=2),
            record("commit", (9, 9), transaction=1),
            record("commit", (6, 7), transaction=2),
            *handled(2, 1),
        ],
    ),
    "the second process of a subscription is read first": (
        "P8",
        [
            *(event(1, version=1), event(2, version=2)),
            Record("handle", {"subscription": "s", "position": 2}, "B", 6, 6),
            Record("handle", {"subscription": "s", "position": 1}, "A", 5, 5),
        ],
    ),
    "the second drainer is read first, order": (
        "P7",
        [
            *(*BOTH, *COMMITS),
            Record("publish", {"job": "b"}, "B", 6, 6),
            Record("publish", {"job": "a"}, "A", 5, 5),
        ],
    ),
    "the second drainer is read first, incident": (
        "P5",
        [
            *(staged("a"), incident(at=99)),
            Record("publish", {"job": "a"}, "B", 100, 100),
            Record("publish", {"job": "a"}, "A", 0, 0),
        ],
    ),
    "the only execution ended with an unknown COMMIT": (
        "P6",
        [staged("a"), published("a"), record("execute", outcome="unknown", job="a")],
    ),
    "a job was refused in a transaction that went on": (
        "P3",
        [committed[1], record("stage", None, "failed", job="a", row=0, shard=0, transaction=1)],
    ),
    "an event was refused that another transaction had prepared": (
        "P10",
        [
            record("prepare", event="p", transaction=1),
            record("prepare", outcome="failed", event="p", transaction=2),
            *(committed[1], record("published", event="p")),
        ],
    ),
    "two ids were not made": ("P13", [record("id", outcome="failed", id=None)] * 2),
}

GUILTY: dict[str, tuple[str, list[Record]]] = {
    "one of two logs of a subscription": (
        "P8",
        [
            event(1, version=1, log="a"),
            event(2, stream="t", version=1, log="b"),
            event(3, stream="t", version=2, log="b"),
            *handled(1, log="a"),
            *handled(2, log="b"),
        ],
    ),
    "a subscription that has handled nothing": (
        "P8",
        [record("subscription", name="shop"), event(1, version=1)],
    ),
    "requeued, and no incident says so": (
        "P5",
        [staged("a", row=1), published("a"), staged("a", row=2), published("a"), incident()],
    ),
    "only an attempt to handle": (
        "P8",
        [
            *(record("subscription", name="shop"), event(1, version=1)),
            record("handle", outcome="failed", subscription="shop", position=1),
        ],
    ),
    "a decision to discard that failed": (
        "P3",
        [staged("a"), record("discard", outcome="failed", job="a")],
    ),
    "published before the commit, by the drainer that is read last": (
        "P2",
        [
            staged("a", 4, transaction=1),
            record("commit", (5, 6), transaction=1),
            *(published("a", 8), published("a", 1), incident(at=7)),
        ],
    ),
    "published before its transaction began; the database keeps no time of commits": (
        "P2",
        [
            record("transaction", (4, 6), id=1),
            *(staged("a", 5, transaction=1), committed[1], published("a", (1, 2))),
        ],
    ),
    "turned; the database keeps no time of commits, but their processes do": (
        "P7",
        [
            *(record("transaction", (1, 2), id=1), record("transaction", (3, 4), id=2)),
            *(*BOTH, *committed.values(), published("b", 5), published("a", 6)),
        ],
    ),
    "a command succeeded at another version than it expected": (
        "P9",
        [command("c", (1, 2), version=9, expected=1), kept(9, "c")],
    ),
    "cancelled for good, and published": (
        "P10",
        [
            *(record("prepare", event="p", transaction=1), committed[1]),
            record("decide", event="p", wanted="cancelled"),
            record("published", event="p"),
        ],
    ),
}


def findings(records: list[Record], promise: str) -> Any:
    but = [name for name in PROMISES if name != "P6" or promise == "P6"]
    return judge(records, promises=but).findings


@pytest.mark.parametrize("name", INNOCENT)
def test_innocent(name: str) -> None:
    promise, history = INNOCENT[name]
    assert findings(history, promise) == {}


@pytest.mark.parametrize("name", GUILTY)
def test_guilty(name: str) -> None:
    promise, history = GUILTY[name]
    assert promise in findings(history, promise)
