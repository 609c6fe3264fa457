"""Contrast as WCAG 2.2 defines it, and what a page shows: its texts and lines with their colours.

Text needs 4.5 to 1, large text and graphics 3 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from playwright.sync_api import Page

TEXT, LARGE, GRAPHIC = 4.5, 3.0, 3.0

#: For each text, line and marked border in a part of the page: what it is, its colour and the
#: colours that lie behind it, nearest first.
LOOK = """
root => {
  const behind = node => {
    const found = [];
    for (let each = node; each; each = each.parentElement) {
      found.push(getComputedStyle(each).backgroundColor);
      if (found.at(-1).startsWith("rgb(")) break;  // opaque: nothing behind it is seen
    }
    return found;
  };
  // A colour that is on its way to another one has arrived.
  document.getAnimations().forEach(each => each.finish());
  const found = [];
  const note = (what, kind, colour, node) => {
    found.push({ what, kind, colour, behind: behind(node) });
  };
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, holder = node.parentElement;
    const text = node.textContent.trim();
    if (!text || ["SCRIPT", "STYLE", "title", "desc"].includes(holder.tagName)) continue;
    if (!holder.checkVisibility({ checkVisibilityCSS: true, opacityProperty: true })) continue;
    const style = getComputedStyle(holder), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const colour = holder instanceof SVGElement ? style.fill : style.color;
    note(text.slice(0, 60), large ? "large" : "text", colour, holder);
  }
  for (const line of root.querySelectorAll("polyline")) {
    note(`line ${line.className.baseVal}`, "graphic", getComputedStyle(line).stroke, line);
  }
  for (const each of root.querySelectorAll(".outbox-headline, .outbox-problems > li")) {
    note(`border of ${each.className}`, "graphic", getComputedStyle(each).borderLeftColor, each);
  }
  return found;
}
"""


def too_faint(page: Page, selector: str) -> list[str]:
    """Return what is harder to see than it may be, in a part of the page."""
    return list(_faint(page.locator(selector).evaluate(LOOK)))


def _faint(seen: list[dict[str, Any]]) -> Iterator[str]:
    needed = {"text": TEXT, "large": LARGE, "graphic": GRAPHIC}
    for each in seen:
        ground = _flat([*each["behind"], "rgb(255, 255, 255)"])
        ratio = contrast(_over(_parsed(each["colour"]), ground), ground)
        if ratio < needed[each["kind"]]:
            yield f"{each['what']!r}: {ratio:.2f}, {each['colour']} on {ground}"


@cache
def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the contrast of two opaque colours: 1 for alike, 21 for black and white."""
    dark, bright = sorted((_luminance(one), _luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: tuple[float, ...]) -> float:
    parts = [value / 255 for value in colour[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _flat(colours: list[str]) -> tuple[float, ...]:
    """Return what is seen of colours that lie on one another, the uppermost first."""
    parsed = [_parsed(colour) for colour in colours]
    opaque = next(place for place, colour in enumerate(parsed) if colour[3] == 1)
    ground = parsed[opaque]
    for colour in reversed(parsed[:opaque]):
        ground = _over(colour, ground)
    return ground[:3]


def _over(colour: tuple[float, ...], ground: tuple[float, ...]) -> tuple[float, ...]:
    alpha = colour[3]
    return (*(alpha * c + (1 - alpha) * g for c, g in zip(colour[:3], ground[:3], strict=True)), 1)


@cache
def _parsed(text: str) -> tuple[float, ...]:
    numbers = [float(number) for number in re.findall(r"[\d.]+", text)]
    assert text.startswith("rgb"), text
    return (*numbers, 1.0) if len(numbers) == 3 else tuple(numbers)
