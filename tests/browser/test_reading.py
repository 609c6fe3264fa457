"""Keyboard and screen reader: Tab reaches every control visibly, and every control has a name."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.tables import list_of

from . import data
from .colours import too_faint
from .project import Project
from .survey import FLAWS, Seen
from .test_actions import choose
from .test_matrix import ACTIONS
from .test_pages import OVERVIEW, opened

#: How something looks, focused or not.
LOOK = """
each => {
  const names = ["outlineStyle", "outlineWidth", "outlineColor", "boxShadow", "borderColor",
                 "color", "backgroundColor", "textDecorationLine"];
  const of = node => names.map(name => getComputedStyle(node)[name]).join("; ");
  return of(each) + of(each.parentElement);
}
"""
#: Notes how all that one can act on looks, and puts the focus before it; says how much it is.
BEGIN = f"""() => {{
  const active = "a[href], button, input:not([type=hidden]), select, summary, textarea";
  const all = [...document.querySelectorAll(`#content :is(${{active}})`)];
  const options = {{ checkVisibilityCSS: true }};
  const wanted = all.filter(each => each.checkVisibility(options) && !each.disabled);
  document.activeElement.blur();
  window.looks = new Map(wanted.map(each => [each, ({LOOK})(each)]));
  const content = document.getElementById("content");
  content.tabIndex = -1;
  content.focus({{ preventScroll: true }});
  return wanted.length;
}}"""
#: After one Tab: how much is left, and where one is if that cannot be seen.
STEP = f"""() => {{
  const here = document.activeElement, before = window.looks.get(here);
  const unseen = before !== undefined && before === ({LOOK})(here);
  window.looks.delete(here);
  return [window.looks.size, unseen ? [here.outerHTML] : []];
}}"""


def test_a_screen_reader_finds_a_name_for_everything(seen: dict[str, Seen]) -> None:
    assert {name: page.flaws for name, page in seen.items() if page.flaws} == {}


def test_charts_say_what_they_show(page: Page) -> None:
    opened(page, OVERVIEW)
    chart = page.get_by_role("img", name=re.compile("Ready jobs, last hour"))
    expect(chart).to_be_visible()
    expect(chart).to_have_accessible_name(re.compile(r"last \d+.*at most [\d,]+"))
    figure = page.get_by_role("figure", name="Ready jobs, last hour")
    figure.get_by_text("As a table").click()
    expect(figure.get_by_role("row")).to_have_count(62)


@pytest.mark.parametrize(
    "address",
    [OVERVIEW, "/admin/outbox_app/deadjob/?task=shop.tasks.reserve_stock",
     "/admin/outbox_events/subscription/invoice-mails/change/"],
    ids=["overview", "list", "row"],
)  # fmt: skip
def test_tab_reaches_everything_and_shows_where_it_is(page: Page, address: str) -> None:
    opened(page, address)
    if address == OVERVIEW:  # what is looked at must stay
        page.get_by_label(re.compile("Refresh every")).uncheck()
    assert unreached(page) == []


@pytest.mark.parametrize(
    ("model", "action"), [(model, action) for model, table in ACTIONS.items() for action in table]
)
def test_a_question_is_as_easy_to_read_and_to_answer(page: Page, model: str, action: str) -> None:
    choose(page, list_of(model), action)
    expect(page.get_by_label("Reason")).to_be_visible()
    assert page.locator("#content").evaluate(FLAWS) == []
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        assert too_faint(page, "#content") == []
    assert unreached(page) == []


def test_a_decision_is_made_with_the_keyboard_alone(project: Project, page: Page) -> None:
    job = project.ask(data.die, "browser.keyboard")
    opened(page, f"/admin/outbox_app/deadjob/{job}/change/")
    page.get_by_role("button", name=re.compile("Discard")).focus()
    page.keyboard.press("Enter")
    page.get_by_label("Reason").focus()
    page.keyboard.type("done with the keyboard")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Discard dead jobs for good")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 dead job was discarded")).to_be_visible()
    assert not project.ask(data.rows, "outbox_app.DeadJob", "pk", pk=job)


def unreached(page: Page) -> list[str]:
    """Press Tab through the content; return what is not reached, or does not show that it is."""
    count = page.evaluate(BEGIN)
    assert count > 2
    unseen = []
    for _ in range(count + 5):
        page.keyboard.press("Tab")
        left, missed = page.evaluate(STEP)
        unseen += missed
        if not left:
            break
    return [*unseen, *page.evaluate("[...window.looks.keys()].map(each => each.outerHTML)")]


def test_names_of_255_characters_stay_on_the_page(project: Project, page: Page) -> None:
    names = {"task": "browser." + "t" * 247, "key": "k" * 255, "queue": "q" * 255}
    for model, row in (("stagedjob", data.hold), ("deadjob", data.die)):
        pk = project.ask(row, **names, task_id="i" * 255)
        opened(page, f"{list_of(model)}{pk}/change/")
        wide = page.evaluate(
            "[...document.querySelectorAll('html, #content h2, .readonly')]"
            ".filter(each => each.scrollWidth > innerWidth).map(each => each.className)"
        )
        assert wide == []
