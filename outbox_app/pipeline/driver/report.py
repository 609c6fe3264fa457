"""The report of an audit: one HTML file that needs no network, no script and no other file.

Names of streams and types are untrusted text: the template escapes all text, and the page's
security policy allows nothing but its own style. The project's settings of templates do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.template import Engine

from ...text import shown
from ..defects import KINDS, Audit
from ..figures import DAYS, Count, Figures
from ..store import write_whole

#: How many defects are listed.
LISTED = 1000


def write_report(path: str | Path, result: Audit, *, figures: Figures) -> None:
    engine = Engine(dirs=[str(Path(__file__).parents[1] / "templates")])
    page = engine.render_to_string("outbox_pipeline/audit.html", _context(result, figures))
    write_whole(str(path), page.encode())


def _context(result: Audit, figures: Figures) -> dict[str, Any]:
    """Return the contents of the page. Numbers are text, the same in every language."""
    advice: dict[str, list[str]] = {}
    for kind in result.counts:
        advice.setdefault(KINDS[kind].advice, []).append(KINDS[kind].title)
    found = {name: f"{result.counts.get(name, 0):,}" for name in result.checked}
    by_kind = [(KINDS[kind].title, number) for kind, number in result.counts.items()]
    listed = [(KINDS[each.kind].title, each.line) for each in result.defects[:LISTED]]
    days = f"Events per day (UTC), the newest {DAYS} days that have any"
    return {
        "log": shown(result.log, 200, but=""),
        "made_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        "seconds": f"{result.seconds:.1f}",
        "sound": result.sound,
        "total": f"{result.total:,}",
        "numbers": {
            "Events": f"{result.events:,}",
            "Streams": f"{result.streams:,}",
            "Defects": f"{result.total:,}",
            "Accepted gaps": f"{result.accepted:,}",
        },
        "by_kind": _chart("Defects by kind", "Kind", by_kind),
        "defects": listed,
        "listed": f"{len(listed):,}",
        "advice": advice,
        "charts": [
            _chart(days, "Day", figures.days),
            _chart("Most frequent types", "Type", figures.types),
            _chart("Biggest streams", "Stream", figures.streams),
        ],
        "checks": [(kind.title, found.get(name, "not checked")) for name, kind in KINDS.items()],
    }


def _chart(title: str, of: str, counts: Sequence[Count]) -> dict[str, Any]:
    bars = [(shown(label, 200, but=""), f"{number:,}", number) for label, number in counts]
    largest = max((number for _, number in counts), default=0)
    return {"title": title, "of": of, "bars": bars, "largest": largest}
