"""One look at every page, for the tests that ask something of all of them.

Each page is opened once. What is seen of it is noted in both themes: a page follows the system's
preference while it is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Page

from .colours import too_faint

#: What a screen reader would stumble over, in what is ours of a page.
FLAWS = """
root => {
  const flaws = [];
  const name = node => node.outerHTML.slice(0, 120);
  for (const svg of root.querySelectorAll("svg")) {
    if (svg.getAttribute("aria-hidden") === "true") continue;
    const ids = (svg.getAttribute("aria-labelledby") || "").split(" ");
    const names = ids.map(id => document.getElementById(id));
    const told = names.length > 1 && names.every(each => each && each.textContent.trim());
    if (svg.getAttribute("role") !== "img" || !told) flaws.push(`chart, no name: ${name(svg)}`);
  }
  for (const table of root.querySelectorAll("table:not(#result_list, #change-history)")) {
    // The table of a chart is in its figure, which has the name.
    if (!table.caption?.textContent.trim() && !table.closest("figure[aria-labelledby]")) {
      flaws.push(`table without a caption: ${name(table)}`);
    }
    for (const cell of table.querySelectorAll("th:not([scope])")) {
      flaws.push(`no scope: ${name(cell)}`);
    }
  }
  for (const image of root.querySelectorAll("img:not([alt])")) flaws.push(`no alt: ${name(image)}`);
  const fields = "input:not([type=hidden], [type=submit]), select, textarea";
  for (const field of root.querySelectorAll(fields)) {
    if (!field.labels?.length && !field.ariaLabel) flaws.push(`no label: ${name(field)}`);
  }
  for (const link of root.querySelectorAll("a[href], button, summary")) {
    const image = link.querySelector("img[alt]");
    if (!(link.textContent.trim() || link.ariaLabel || link.title || image?.alt)) {
      flaws.push(`nothing to read: ${name(link)}`);
    }
  }
  const ids = [...document.querySelectorAll("[id]")].map(each => each.id);
  for (const id of new Set(ids.filter((each, place) => ids.indexOf(each) !== place))) {
    flaws.push(`id twice: ${id}`);
  }
  const headings = [...root.querySelectorAll("h1, h2, h3, h4, h5, h6")];
  const levels = headings.map(each => Number(each.tagName[1]));
  if (levels.filter(each => each === 1).length !== 1) flaws.push(`headings: ${levels}`);
  if (!document.documentElement.lang) flaws.push("no language");
  return flaws;
}
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What there was to see of a page."""

    status: int
    policy: str
    title: str
    text: str
    links: list[str]
    #: What has no name for a screen reader.
    flaws: list[str]
    #: What is too faint, by theme.
    faint: dict[str, list[str]]
    #: Whether there are charts, and the colours of their lines, by theme.
    lines: dict[str, dict[str, str]]


def survey(page: Page, addresses: Mapping[str, str]) -> dict[str, Seen]:
    """Look at pages; return what is seen, by the names of their addresses."""
    return {name: _look(page, address) for name, address in addresses.items()}


def _look(page: Page, address: str) -> Seen:
    page.emulate_media(color_scheme="light")
    response: Any = page.goto(address)
    content = page.locator("#content")
    seen = Seen(
        status=response.status,
        policy=response.headers.get("content-security-policy", ""),
        title=page.title(),
        text=content.inner_text(),
        links=content.locator("a[href]").evaluate_all("all => all.map(each => each.href)"),
        flaws=content.evaluate(FLAWS),
        faint={},
        lines={},
    )
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        seen.faint[theme] = too_faint(page, "#content")
        seen.lines[theme] = lines(page)
    return seen


def lines(page: Page) -> dict[str, str]:
    """Return the colours of the lines in charts, by their classes."""
    pairs = page.locator("polyline").evaluate_all(
        "all => all.map(each => [each.className.baseVal, getComputedStyle(each).stroke])"
    )
    return dict(pairs)
