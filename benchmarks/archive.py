"""The archive beside Spark's JDBC to Parquet, and how fast archived events are removed.

It is the part of ``spark`` about making an archive, with the same contestants in turns, and this:
old events are archived, and ``prune_events`` removes them, in this process, each after it was
compared with its archived row; beside that it removes as many without an archive.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django

from .spark import _archive, _archives, _compare, _databases, _fill, _in_turns, _ratio, _session

ASKED = {
    "archive_vs_jdbc_parquet": "at least 0.9",
    "prune_rows_per_second": "at least 20000",
    "lost": "0",
    "duplicated": "0",
}


def run(*, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked`` and ``rounds`` (seconds each).
    """
    django.setup()
    events, rounds = (150_000, 2) if quick else (1_000_000, 5)
    with _databases(), _session() as session, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fill("postgres", events)
        contestants = _archives(session, folder)
        writers = {each: contestants[each] for each in ("archive", "jdbc_all_parquet")}
        archive = _in_turns(rounds, writers, "archive")
        exact = _compare(folder / "archive")
        prune = _in_turns(rounds, _prunes(session, folder, events // 10), "prune")
    return {
        "ratios": {
            "archive_vs_jdbc_parquet": _ratio(archive, "jdbc_all_parquet", "archive"),
            "prune_rows_per_second": statistics.median(
                events // 10 / turn["prune"] for turn in prune
            ),
            "prune_vs_without_archive": _ratio(prune, "prune_all", "prune"),
            **exact,
        },
        "asked": ASKED,
        "rounds": {"archive": archive, "prune": prune},
    }


def _prunes(session: Any, folder: Path, events: int) -> dict[str, Callable[[], None]]:
    """Return what makes old events and archives them, what removes them, and both without it."""
    from django.db import connections

    from outbox_app.events import prune_events

    def fill() -> None:
        _fill("postgres", events)
        with connections["postgres"].cursor() as cursor:
            cursor.execute("UPDATE outbox_event SET recorded_at = recorded_at - interval '9 days'")
            cursor.execute("VACUUM FULL ANALYZE outbox_event")

    def archive() -> None:
        fill()
        _archive(session, folder)()

    def prune(archive: Path | None) -> None:
        options: Any = {"older_than": 3, "archive": archive and str(archive)}
        removed = prune_events(
            using="postgres", log="outbox_event", write=lambda line: None, **options
        )
        assert removed == events

    return {
        "archive": archive,
        "prune": lambda: prune(folder / "archive"),
        "fill": fill,
        "prune_all": lambda: prune(None),
    }
