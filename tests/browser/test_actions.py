"""Each action, made in the browser as a person makes it, and its effect.

The drainer, the worker and the subscriptions are running: a job that is requeued is executed.
"""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.tables import list_of

from . import data
from .project import Project
from .survey import FLAWS
from .test_pages import GO, opened

DEAD, STAGED = "outbox_app.DeadJob", "outbox_app.StagedJob"


def choose(page: Page, address: str, action: str, row: str | None = None) -> None:
    """Select a row, or all of the page, and ask for an action."""
    opened(page, address)
    rows = page.get_by_role("row", name=row) if row else page.locator("#result_list thead")
    rows.get_by_role("checkbox").check()
    page.get_by_label("Action:").select_option(action)
    page.get_by_role("button", name=GO).click()


def answer(page: Page, reason: str = "because of a test", **fields: str) -> None:
    """Fill in the question that is open, and confirm it."""
    for label, value in {"Reason": reason, **fields}.items():
        page.get_by_label(label).fill(value)
    page.locator("#content input[type=submit]").click()


def decide(page: Page, model: str, action: str, row: str, **fields: str) -> None:
    choose(page, list_of(model), action, row)
    answer(page, **fields)


def logged(project: Project, words: str) -> bool:
    return bool(project.ask(data.rows, "admin.LogEntry", "pk", change_message__contains=words))


def said(page: Page, words: str) -> None:
    expect(page.locator(".messagelist")).to_contain_text(words)


def test_a_requeued_job_is_executed(project: Project, page: Page) -> None:
    task_id = project.ask(data.kill_order_anew)
    decide(page, "deadjob", "requeue_selected", task_id, reason="the broker is back")
    said(page, "1 dead job was requeued.")
    assert not project.ask(data.rows, DEAD, "pk", task_id=task_id)
    assert project.ask(data.rows, "outbox_app.Incident", "pk", detail__contains="by demo")
    assert logged(project, "the broker is back")
    project.ask(data.wait_for, "shop.Execution", task_id=task_id, state="SUCCESS")


def test_a_discarded_job_is_gone(project: Project, page: Page) -> None:
    job = project.ask(data.die, "browser.discard", task_id="discard-me")
    decide(page, "deadjob", "discard_selected", "discard-me", reason="of no use")
    said(page, "1 dead job was discarded.")
    assert not project.ask(data.rows, DEAD, "pk", pk=job)
    assert logged(project, "of no use")


def test_a_cancelled_job_never_leaves(project: Project, page: Page) -> None:
    job = project.ask(data.hold, "browser.cancel", task_id="cancel-me")
    decide(page, "stagedjob", "cancel_selected", "cancel-me", reason="ordered twice")
    said(page, "1 staged job was cancelled.")
    assert not project.ask(data.rows, STAGED, "pk", pk=job)
    assert logged(project, "ordered twice")


def test_from_the_page_of_a_row(project: Project, page: Page) -> None:
    job = project.ask(data.die, "browser.row")
    opened(page, f"{list_of('deadjob')}{job}/change/")
    page.get_by_role("button", name=re.compile("Discard")).click()
    answer(page)
    said(page, "1 dead job was discarded.")
    assert not project.ask(data.rows, DEAD, "pk", pk=job)


def test_a_subscription_is_paused_and_resumed(project: Project, page: Page) -> None:
    def paused() -> Any:
        return project.ask(data.rows, "outbox_events.Subscription", "paused", name="loyalty-points")

    decide(page, "subscription", "pause_selected", "loyalty-points", reason="maintenance")
    said(page, "Paused: loyalty-points.")
    assert paused() == [True]
    expect(page.get_by_role("row", name="loyalty-points paused")).to_be_visible()
    decide(page, "subscription", "resume_selected", "loyalty-points")
    said(page, "Resumed: loyalty-points.")
    assert paused() == [False]
    assert logged(project, "maintenance")


def test_a_subscription_is_replayed(project: Project, page: Page) -> None:
    cursor = "outbox_events.Cursor"
    project.ask(data.wait_for, cursor, subscription="loyalty-points", handled__gt=0)
    [before] = project.ask(data.rows, cursor, "handled", subscription="loyalty-points")
    decide(page, "subscription", "replay_selected", "loyalty-points", From="beginning",
           reason="points were lost")  # fmt: skip
    said(page, "Moved: loyalty-points")
    assert logged(project, "points were lost")
    project.ask(data.wait_for, cursor, subscription="loyalty-points", handled__gt=before)


def test_a_place_that_makes_no_sense_is_refused(project: Project, page: Page) -> None:
    decide(page, "subscription", "replay_selected", "loyalty-points", From="the day before")
    expect(page.locator(".errorlist")).to_be_visible()
    assert page.get_by_label("Reason").input_value() == "because of a test"


def test_a_parked_stream_is_released(project: Project, page: Page) -> None:
    project.ask(data.gap, "order-3001", "loyalty-points")
    decide(page, "parkedstream", "release_selected", "order-3001", reason="corrected")
    said(page, "1 stream was released.")
    kept = project.ask(data.rows, "outbox_events.ParkedStream", "released", stream="order-3001")
    assert kept in ([], [True])  # its subscription has come to it, or not
    assert logged(project, "corrected")


def test_all_streams_of_a_subscription_are_released(project: Project, page: Page) -> None:
    project.ask(data.gap, "order-3002", "loyalty-points")
    decide(page, "subscription", "release_selected", "loyalty-points")
    said(page, "1 stream was released.")


def test_a_gap_is_skipped_with_a_name_and_a_reason(project: Project, page: Page) -> None:
    gap = project.ask(data.gap, "order-3003")
    decide(page, "gap", "skip_selected", "order-3003", reason="rolled back by hand")
    said(page, "Skipped: ")
    columns = ("state", "settled_by", "reason")
    found = project.ask(data.rows, "outbox_events.Gap", *columns, pk=gap)
    assert found == [("skipped", "demo", "rolled back by hand")]


def test_without_a_reason_nothing_is_done(project: Project, page: Page) -> None:
    job = project.ask(data.die, "browser.reason", task_id="no-reason")
    decide(page, "deadjob", "discard_selected", "no-reason", reason="")
    expect(page.get_by_label("Reason")).to_be_focused()  # the browser says what is missing
    page.locator("#content form").evaluate("form => form.noValidate = true")
    answer(page, reason="  ")
    expect(page.locator(".errorlist")).to_contain_text("required")
    assert project.ask(data.rows, DEAD, "pk", pk=job)
    page.get_by_role("link", name="No, take me back").click()
    expect(page.locator("#result_list")).to_be_visible()


def choose_all(page: Page, task: str, count: int) -> None:
    """Ask to discard all dead jobs of a task, more than the page shows."""
    opened(page, f"{list_of('deadjob')}?task={task}")
    page.locator("#result_list thead").get_by_role("checkbox").check()
    page.get_by_role("button", name=f"Select all {count} dead jobs").click()
    page.get_by_label("Action:").select_option("discard_selected")
    page.get_by_role("button", name=GO).click()
    expect(page.get_by_text(f"Number of jobs: {count}")).to_be_visible()


def test_all_that_are_on_the_page(project: Project, page: Page) -> None:
    project.ask(data.die_often, "browser.page", 130)
    choose(page, f"{list_of('deadjob')}?task=browser.page", "discard_selected")
    expect(page.get_by_text("Number of jobs: 100")).to_be_visible()
    answer(page)
    said(page, "100 dead jobs were discarded.")
    assert len(project.ask(data.rows, DEAD, "pk", task="browser.page")) == 30


def test_a_long_decision_goes_on_and_can_be_stopped(project: Project, page: Page) -> None:
    """It says how many it has changed and how many remain, and waits for the button."""
    project.ask(data.die_often, "browser.stop", 1100)
    choose_all(page, "browser.stop", 1100)
    answer(page, reason="not all of them")
    expect(page.get_by_role("status")).to_contain_text("500 dead jobs were discarded.")
    expect(page.get_by_text("Remaining jobs: 600")).to_be_visible()
    assert page.locator("#content").evaluate(FLAWS) == []
    assert page.get_by_label("Reason").input_value() == "not all of them"
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("status")).to_contain_text("1000 dead jobs were discarded.")
    page.get_by_role("link", name="Stop here").click()
    expect(page.locator("#result_list")).to_be_visible()
    assert len(project.ask(data.rows, DEAD, "pk", task="browser.stop")) == 100
    assert logged(project, "not all of them")


def test_without_javascript_too(project: Project, open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    job = project.ask(data.die, "browser.plain", task_id="no-script")
    decide(page, "deadjob", "discard_selected", "no-script")
    said(page, "1 dead job was discarded.")
    assert not project.ask(data.rows, DEAD, "pk", pk=job)


def test_all_that_match_without_javascript(project: Project, open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    project.ask(data.die_often, "browser.all", 600)
    opened(page, f"{list_of('deadjob')}?task=browser.all")
    page.get_by_role("button", name="Discard dead jobs for good").click()
    expect(page.get_by_text("Number of jobs: 600")).to_be_visible()
    answer(page)
    expect(page.get_by_role("status")).to_contain_text("500 dead jobs were discarded.")
    page.get_by_role("button", name="Continue").click()
    said(page, "600 dead jobs were discarded.")
    assert not project.ask(data.rows, DEAD, "pk", task="browser.all")
    assert project.ask(data.rows, DEAD, "pk", task="shop.tasks.send_receipt")


def test_sensitive_values_are_masked(project: Project, page: Page) -> None:
    job = project.ask(data.hold, "browser.masked")
    opened(page, f"{list_of('stagedjob')}{job}/change/")
    expect(page.get_by_text('"password"')).to_be_visible()
    assert "hunter2" not in page.content()


def test_messages_are_hidden_from_whom_may_not_see_them(project: Project, open_page: Any) -> None:
    page = open_page(("view_stagedjob",))
    opened(page, list_of("stagedjob"))
    expect(page.get_by_label("Action:")).to_have_count(0)
    page.get_by_role("row", name="customer-3").get_by_role("link").first.click()
    expect(page.get_by_text("view_payload_stagedjob").first).to_be_visible()
    assert "traceparent" not in page.content()
    expect(page.locator("#content button")).to_have_count(0)


def test_one_is_offered_what_one_may_do(open_page: Any) -> None:
    page = open_page(("view_deadjob", "requeue_deadjob"))
    opened(page, list_of("deadjob"))
    offered = page.get_by_label("Action:").locator("option").all_inner_texts()
    assert [each for each in offered if "-" not in each] == ["Requeue dead jobs"]
