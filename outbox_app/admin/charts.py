"""Charts of figures over time as SVG, drawn on the server: no script, no third-party assets.

A chart is one SVG with a title and a description for screen readers, a legend, and its figures as
a table to open. Colors and dashes come from classes of ``admin.css``, for light and dark themes. No
element has an inline style, so a strict content security policy allows the chart. A missing sample
is a hole in the line, not a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from math import floor, log10
from typing import Any

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..monitoring.figures import number
from ..monitoring.series import Series

WIDTH, HEIGHT = 480, 100
_LEFT, _RIGHT, _TOP, _FLOOR = 52, WIDTH - 10, 10, HEIGHT - 22


@dataclass(frozen=True, slots=True)
class Line:
    #: Name of the figures in the legend.
    name: Any
    #: One value per step, None where there is no sample.
    values: Sequence[float | None]
    #: Class of its color and dashes: ``outbox-line-1`` to ``outbox-line-3``.
    number: int = 1


def job_charts(hour: Series, day: Series, *, now: int) -> list[SafeString]:
    """Return charts of backlog and rates, by hour and by day; ``now`` is the current backlog."""
    drawn = []
    for name, heading, counted in (("hour", _("last hour"), hour), ("day", _("last day"), day)):
        if counted is day:  # the peak of a step, not what it ended with
            peak = max(now, counted.ready[-1] or 0)
            ready = Line(_("ready, the most in ten minutes"), [*counted.ready[:-1], peak], 1)
        else:
            ready = Line(_("ready"), [*counted.ready[:-1], now], 1)
        title = _("Ready jobs, %(span)s") % {"span": heading}
        drawn.append(chart(f"outbox-backlog-{name}", title, counted.starts, [ready]))
        # Without the current step, which is not over: its rates would look like a drop.
        rates = [
            Line(_("published"), _known(counted, counted.published)[:-1], 1),
            Line(_("dead"), _known(counted, counted.dead)[:-1], 3),
        ]
        title = _("Jobs per minute, %(span)s") % {"span": heading}
        drawn.append(chart(f"outbox-rates-{name}", title, counted.starts[:-1], rates))
    return drawn


def _known(counted: Series, values: list[float]) -> list[float | None]:
    """Return the values, but None for steps without sample and count: no process was running."""
    steps = zip(values, counted.ready, counted.published, counted.dead, strict=True)
    return [None if ready is None and not (out or dead) else n for n, ready, out, dead in steps]


def chart(name: str, title: Any, starts: Sequence[datetime], lines: Sequence[Line]) -> SafeString:
    """Return a chart of at most three lines; empty without figures. Its name must be unique."""
    known = [value for line in lines for value in line.values if value is not None]
    if not known:
        return SafeString("")
    scale = _round_up(max(known))
    times = [date_format(timezone.localtime(start), "H:i") for start in starts]
    rows = [
        (time, [number(line.values[place]) for line in lines]) for place, time in enumerate(times)
    ]
    names = [line.name for line in lines]
    last, width = len(rows) - 1, (_RIGHT - _LEFT) / max(1, len(rows))
    marked = {0: "start", last // 2: "middle", last: "end"} if last > 1 else {0: "start"}
    context = {
        "name": name,
        "title": title,
        "description": "; ".join(map(_described, lines)),
        "width": WIDTH,
        "height": HEIGHT,
        "left": _LEFT,
        "right": _RIGHT,
        "top": _TOP,
        "rules": [(_FLOOR, "0"), ((_FLOOR + _TOP) // 2, number(scale / 2)), (_TOP, number(scale))],
        "marks": [
            (f"{_x(place, len(rows)):.1f}", anchor, rows[place][0])
            for place, anchor in marked.items()
            if rows
        ],
        "lines": [(line.number, line.name, list(_runs(line.values, scale))) for line in lines],
        # An invisible area for each step, whose tooltip has the figures.
        "areas": [
            (f"{_LEFT + place * width:.1f}", "\n".join([time, *map("{}: {}".format, names, shown)]))
            for place, (time, shown) in enumerate(rows)
        ],
        "area_width": f"{width:.1f}",
        "area_height": _FLOOR - _TOP,
        "rows": rows[::-1],
    }
    return render_to_string("admin/outbox_app/chart.html", context)


def _described(line: Line) -> str:
    known = [value for value in line.values if value is not None]
    if not known:
        return _("%(name)s: no figures") % {"name": line.name}
    return _("%(name)s: last %(last)s, at most %(most)s") % {
        "name": line.name,
        "last": number(known[-1]),
        "most": number(max(known)),
    }


def _runs(values: Sequence[float | None], top: float) -> Iterator[str]:
    """Yield the points of each part of a line between holes; a single point is a short dash."""
    steps = list(enumerate(values))
    for known, group in groupby(steps, key=lambda step: step[1] is not None):
        if not known:
            continue
        points = [
            (_x(place, len(values)), _FLOOR - (value or 0) / top * (_FLOOR - _TOP))
            for place, value in group
        ]
        if len(points) == 1:
            x, y = points[0]
            points = [(x - 3, y), (x + 3, y)]
        yield " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _x(place: int, steps: int) -> float:
    return round(_LEFT + (place + 0.5) * (_RIGHT - _LEFT) / steps, 1)


def _round_up(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below the value."""
    if value <= 1:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
