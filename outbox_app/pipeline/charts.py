"""Charts as SVG, drawn without a script and without a network; they go into a page of ``report``.

Colors come from the page's style (``--bar``, ``--ink``, ``--faint``), so a chart is dark where the
page is. Each has a title and a description for screen readers, and its numbers as a table below.
Labels are text of strangers: they are cut and escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import count

from .defects import visible

#: A label and its number.
Bar = tuple[str, int]

WIDTH = 720
_ROW, _LABELS, _NUMBERS = 26, 230, 90
_HEIGHT, _FOOT = 200, 24
#: Characters of a label that fit in front of its bar.
_FITS = 28

_names = count(1)


def bars(title: str, of: str, values: Sequence[Bar]) -> str:
    """Return a chart of one horizontal bar for each value.

    Args:
        title: Heading.
        of: What the labels are, as the heading of their column.
        values: Labels and numbers, in the order in which they are drawn.
    """
    largest = max((number for _, number in values), default=0)
    room = WIDTH - _LABELS - _NUMBERS
    parts = []
    for row, (label, number) in enumerate(values):
        y = row * _ROW
        length = _part(number, largest, room)
        parts.append(
            f'<text class="label" x="{_LABELS - 8}" y="{y + 17}">{_text(label, _FITS)}</text>'
            f'<rect x="{_LABELS}" y="{y + 4}" width="{length:.1f}" height="{_ROW - 8}" rx="2"/>'
            f'<text x="{_LABELS + length + 6:.1f}" y="{y + 17}">{number:,}</text>'
        )
    return _figure(title, of, values, parts, len(values) * _ROW)


def columns(title: str, of: str, values: Sequence[Bar]) -> str:
    """Return a chart of one upright bar for each value, as of a time.

    Args:
        title, of, values: As for ``bars``.
    """
    largest = max((number for _, number in values), default=0)
    width = min(WIDTH / max(1, len(values)), WIDTH / 12)
    floor = _HEIGHT - _FOOT
    parts = [f'<line x1="0" y1="{floor}" x2="{WIDTH}" y2="{floor}"/>']
    for place, (label, number) in enumerate(values):
        height = _part(number, largest, floor - 20)
        parts.append(
            f'<rect x="{place * width + width * 0.1:.1f}" y="{floor - height:.1f}" '
            f'width="{width * 0.8:.1f}" height="{height:.1f}">'
            f"<title>{_text(label, _FITS)}: {number:,}</title></rect>"
        )
    if values:
        parts.append(f'<text x="0" y="12">{largest:,}</text>')
        parts.append(f'<text x="0" y="{_HEIGHT - 6}">{_text(values[0][0], _FITS)}</text>')
    if len(values) > 1:
        last = _text(values[-1][0], _FITS)
        parts.append(f'<text class="label" x="{WIDTH}" y="{_HEIGHT - 6}">{last}</text>')
    return _figure(title, of, values, parts, _HEIGHT)


def _figure(title: str, of: str, values: Sequence[Bar], parts: Sequence[str], height: int) -> str:
    name = f"chart-{next(_names)}"
    if not values:
        return f"<figure><figcaption>{_text(title)}</figcaption><p>Nothing.</p></figure>"
    top = max(values, key=lambda bar: bar[1])
    said = f"{len(values)} values; the largest is {_text(top[0])} with {top[1]:,}."
    rows = "".join(
        f"<tr><td>{_text(label)}</td><td>{number:,}</td></tr>" for label, number in values
    )
    return (
        f"<figure><figcaption>{_text(title)}</figcaption>"
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{_text(title)}</title>'
        f'<desc id="{name}-desc">{said}</desc>{"".join(parts)}</svg>'
        f"<details><summary>As a table</summary><table><thead><tr><th>{_text(of)}</th>"
        f"<th>Number</th></tr></thead><tbody>{rows}</tbody></table></details></figure>"
    )


def _part(number: int, largest: int, room: float) -> float:
    """Return the length of a bar: one pixel at least, where there is something."""
    return max(1.0, number / largest * room) if number > 0 else 0.0


def _text(text: str, limit: int = 200) -> str:
    return escape(visible(text, limit))
