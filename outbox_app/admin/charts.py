"""Charts of figures over time as SVG, drawn on the server: no script, nothing from elsewhere.

A chart is one SVG with a title and a description for screen readers, a legend, and its figures as
a table to open. Colors and dashes come from classes of ``admin.css``, for light and dark; nothing
has a style of its own, so that a strict content security policy lets it be. Without a sample there
is a hole in the line, not a zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from math import floor, log10
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

WIDTH, HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 22
_FLOOR = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    #: What the figures are.
    name: Any
    #: One per step; None: no sample.
    values: Sequence[float | None]
    #: Class of its color and dashes: ``outbox-line-1`` to ``outbox-line-3``.
    number: int = 1


def chart(name: str, title: Any, starts: Sequence[datetime], lines: Sequence[Line]) -> SafeString:
    """Return a chart of at most three lines. No two charts of a page have the same name."""
    top = _round_up(max((value or 0 for line in lines for value in line.values), default=0))
    known = any(value is not None for line in lines for value in line.values)
    return format_html(
        '<figure class="outbox-chart" aria-labelledby="{name}-caption">'
        '<figcaption id="{name}-caption">{title}</figcaption>'
        '<svg role="img" viewBox="0 0 {width} {height}" aria-labelledby="{name}-title {name}-desc">'
        '<title id="{name}-title">{title}</title><desc id="{name}-desc">{said}</desc>'
        "{frame}{drawn}{points}</svg>{legend}{empty}{table}</figure>",
        name=name,
        title=title,
        width=WIDTH,
        height=HEIGHT,
        said="; ".join(map(_said, lines)),
        frame=_frame(starts, top),
        drawn=format_html_join("", "{}", ((_drawn(line, top),) for line in lines)),
        points=_points(starts, lines),
        legend=_legend(lines),
        empty="" if known else format_html("<p>{}</p>", _("No figures yet.")),
        table=_table(starts, lines),
    )


def _said(line: Line) -> str:
    known = [value for value in line.values if value is not None]
    if not known:
        return _("%(name)s: no figures") % {"name": line.name}
    return _("%(name)s: now %(now)s, at most %(most)s") % {
        "name": line.name,
        "now": number(known[-1]),
        "most": number(max(known)),
    }


def _frame(starts: Sequence[datetime], top: float) -> SafeString:
    rules = [(_FLOOR, "0"), ((_FLOOR + _TOP) / 2, number(top / 2)), (_TOP, number(top))]
    marks = []
    if starts:
        last = len(starts) - 1
        shown = {0: "start", last // 2: "middle", last: "end"} if last > 1 else {0: "start"}
        marks = [
            (_x(place, len(starts)), HEIGHT - 6, anchor, _time(starts[place]))
            for place, anchor in shown.items()
        ]
    return format_html(
        "{}{}{}",
        format_html_join(
            "",
            '<line class="outbox-rule" x1="{}" y1="{}" x2="{}" y2="{}"/>',
            ((_LEFT, y, WIDTH - _RIGHT, y) for y, _text in rules),
        ),
        format_html_join(
            "",
            '<text x="{}" y="{}" text-anchor="end">{}</text>',
            ((_LEFT - 6, y + 4, text) for y, text in rules),
        ),
        format_html_join("", '<text x="{}" y="{}" text-anchor="{}">{}</text>', marks),
    )


def _drawn(line: Line, top: float) -> SafeString:
    return format_html_join(
        "",
        '<polyline class="outbox-line-{}" points="{}"/>',
        ((line.number, run) for run in _runs(line.values, top)),
    )


def _runs(values: Sequence[float | None], top: float) -> Iterator[str]:
    """Yield the points of each part of a line that has no hole; one alone is a short dash."""
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


def _points(starts: Sequence[datetime], lines: Sequence[Line]) -> SafeString:
    """Return an area for each step, which tells its figures to a pointer."""
    width = (WIDTH - _LEFT - _RIGHT) / max(1, len(starts))
    return format_html_join(
        "",
        '<rect class="outbox-point" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
        (
            (
                f"{_LEFT + place * width:.1f}",
                _TOP,
                f"{width:.1f}",
                _FLOOR - _TOP,
                "\n".join([_time(start), *(_figure(line, place) for line in lines)]),
            )
            for place, start in enumerate(starts)
        ),
    )


def _figure(line: Line, place: int) -> str:
    return f"{line.name}: {number(line.values[place])}"


def _legend(lines: Sequence[Line]) -> SafeString:
    return format_html(
        '<ul class="outbox-legend">{}</ul>',
        format_html_join(
            "",
            '<li><svg aria-hidden="true" viewBox="0 0 24 8"><polyline class="outbox-line-{}" '
            'points="0,4 24,4"/></svg> {}</li>',
            ((line.number, line.name) for line in lines),
        ),
    )


def _table(starts: Sequence[datetime], lines: Sequence[Line]) -> SafeString:
    return format_html(
        "<details><summary>{}</summary><table><thead><tr>"
        '<th scope="col">{}</th>{}</tr></thead><tbody>{}</tbody></table></details>',
        _("As a table"),
        _("From"),
        format_html_join("", '<th scope="col">{}</th>', ((line.name,) for line in lines)),
        format_html_join(
            "",
            '<tr><th scope="row">{}</th>{}</tr>',
            (
                (
                    _time(start),
                    format_html_join(
                        "", "<td>{}</td>", ((number(line.values[place]),) for line in lines)
                    ),
                )
                for place, start in reversed(list(enumerate(starts)))
            ),
        ),
    )


def number(value: float | None) -> str:
    """Return a figure for people, ``?`` without a sample."""
    if value is None:
        return "?"
    return number_format(value, 0 if value >= 10 or value == int(value) else 1, force_grouping=True)


def _x(place: int, steps: int) -> float:
    return round(_LEFT + (place + 0.5) * (WIDTH - _LEFT - _RIGHT) / steps, 1)


def _round_up(value: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below the value."""
    if value <= 1:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _time(moment: datetime) -> str:
    local = timezone.localtime(moment) if timezone.is_aware(moment) else moment
    return date_format(local, "H:i")
