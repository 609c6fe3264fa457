"""The report of an audit: one HTML file that needs no network, no script and no other file.

Names of streams and types are untrusted text: all text is escaped, and the page's security policy
allows nothing but its own style.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import shown
from .defects import ALL_KINDS, KINDS, Audit
from .store import write_whole

if TYPE_CHECKING:
    from .figures import Figures

#: A label and its number.
Bar = tuple[str, int]

#: How many defects are listed.
LISTED = 1000

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2328; --faint: #5b646e; --line: #d5dae0;
  --card: #f5f7f9; --bar: #2f6db5; --good: #1a7f37; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e8ec; --faint: #9aa5b1;
  --line: #333c46; --card: #1d242c; --bar: #6aa5e8; --good: #4cc36a; --bad: #ff8a7a; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; }
.verdict { font-size: 1.2rem; font-weight: 600; }
.sound { color: var(--good); } .unsound { color: var(--bad); }
dl.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
dl.figures div { background: var(--card); border-radius: 6px; padding: .6rem 1rem; }
dl.figures dt, .faint { color: var(--faint); font-size: .9rem; }
dl.figures dd { margin: 0; font-size: 1.4rem; }
figure { margin: 2rem 0; } figcaption { font-weight: 600; margin-bottom: .5rem; }
.bar { height: 1.2em; background: var(--bar); } td:has(.bar) { width: 45%; }
.columns { display: flex; align-items: flex-end; height: 180px; border-bottom: 1px solid; }
.columns div { background: linear-gradient(90deg, var(--bar) 85%, #0000 0); flex: 1; }
.columns div { max-width: 8%; } .bar, .columns div { print-color-adjust: exact; }
.ends { display: flex; justify-content: space-between; } figure p { margin: 0; }
table { border-collapse: collapse; width: 100%; } summary { cursor: pointer; color: var(--faint); }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th, figure td:nth-child(2) { white-space: nowrap; }
"""


def write_report(path: str | Path, result: Audit, *, figures: Figures | None = None) -> None:
    write_whole(str(path), _page(result, figures).encode(errors="backslashreplace"))


def _page(result: Audit, figures: Figures | None) -> str:
    name = _text(result.log)
    parts = [_head(result, name)]
    if not result.sound:
        parts += [_defects(result), _advice(result)]
    if figures is not None:
        parts.append(_pictures(figures))
    parts.append(_checked(result))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {name}</title><style>{_STYLE}</style></head>\n"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _head(result: Audit, name: str) -> str:
    verdict = ("sound", "Sound: nothing is missing, doubled or out of order.")
    if not result.sound:
        what = "1 defect was" if result.total == 1 else f"{result.total:,} defects were"
        verdict = ("unsound", f"{what} found.")
    numbers = {
        "Events": result.events,
        "Streams": result.streams,
        "Defects": result.total,
        "Accepted gaps": result.accepted,
    }
    cards = "".join(f"<div><dt>{name}</dt><dd>{n:,}</dd></div>" for name, n in numbers.items())
    return (
        f'<header><h1>Audit of {name}</h1><p class="faint">{datetime.now(UTC):%Y-%m-%d %H:%M} '
        f'UTC, in {result.seconds:.1f} s</p><p class="verdict {verdict[0]}">{verdict[1]}</p>'
        f'<dl class="figures">{cards}</dl></header>'
    )


def _defects(result: Audit) -> str:
    listed = [(ALL_KINDS[each.kind].title, escape(each.line)) for each in result.defects[:LISTED]]
    more = ""
    if result.total > len(listed):
        more = f'<p class="faint">Listed: {len(listed):,} of {result.total:,}.</p>'
    found = [(ALL_KINDS[kind].title, number) for kind, number in result.counts.items()]
    chart = bars("Defects by kind", "Kind", found)
    return f"<h2>Defects</h2>{chart}{_table(('Kind', 'Defect'), listed)}{more}"


def _advice(result: Audit) -> str:
    advice: dict[str, list[str]] = {}
    for kind in result.counts:
        advice.setdefault(ALL_KINDS[kind].advice, []).append(ALL_KINDS[kind].title)
    items = "".join(
        f"<dt><strong>{escape('; '.join(titles))}</strong></dt><dd>{escape(what)}</dd>"
        for what, titles in advice.items()
    )
    return f"<h2>What to do</h2><dl>{items}</dl>"


def _pictures(figures: Figures) -> str:
    return (
        "<h2>What is in the log</h2>"
        + columns(f"Events per {figures.unit}", figures.unit.capitalize(), figures.over_time)
        + bars("Most frequent types", "Type", figures.types)
        + bars("Biggest streams", "Stream", figures.streams)
    )


def _checked(result: Audit) -> str:
    found = {name: f"{result.counts.get(name, 0):,}" for name in result.checked}
    kinds = {name: kind for name, kind in ALL_KINDS.items() if name in KINDS or name in found}
    rows = [(kind.title, found.get(name, "not checked")) for name, kind in kinds.items()]
    return f"<h2>What was checked</h2>{_table(('Check', 'Found'), rows)}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells in HTML."""
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(title: str, of: str, values: Sequence[Bar]) -> str:
    if not values:
        return _figure(title)
    largest = max(number for _, number in values)
    bar = '<div class="bar" style="width: {:.1f}%"></div>'
    rows = [
        (_text(label), f"{number:,}", bar.format(_part(number, largest)))
        for label, number in values
    ]
    return _figure(title, _table((of, "Number", ""), rows))


def columns(title: str, of: str, values: Sequence[Bar]) -> str:
    if not values:
        return _figure(title)
    top, largest = max(values, key=itemgetter(1))
    drawn = "".join(
        f'<div title="{_text(label)}: {number:,}" '
        f'style="height: {_part(number, largest):.1f}%"></div>'
        for label, number in values
    )
    labels = dict.fromkeys((values[0][0], values[-1][0]))  # one, if there is one column
    ends = "".join(f"<span>{_text(label)}</span>" for label in labels)
    told = f"{len(values)} values; the largest is {_text(top)} with {largest:,}."
    rows = [(_text(label), f"{number:,}") for label, number in values]
    return _figure(
        title,
        f'<p>{largest:,}</p><div class="columns" role="img" aria-label="{told}">{drawn}</div>'
        f'<p class="ends">{ends}</p>'
        f"<details><summary>As a table</summary>{_table((of, 'Number'), rows)}</details>",
    )


def _figure(title: str, content: str = "<p>Nothing.</p>") -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


def _part(number: int, largest: int) -> float:
    """Return a length in percent; what is there is seen."""
    return max(1.0, number / largest * 100) if number > 0 else 0.0


def _text(text: str, limit: int = 200) -> str:
    return escape(shown(text, limit, but=""))
