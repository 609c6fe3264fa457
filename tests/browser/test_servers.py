"""The same pages on PostgreSQL and MariaDB, and the sessions there that make others wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import pytest
from playwright.sync_api import Page, expect

from tests.conftest import VARIABLES, _service

from . import data, prepared
from .conftest import session
from .project import Project
from .survey import survey
from .test_actions import DEAD, decide, said
from .test_pages import OVERVIEW, opened
from .window import Browser

pytestmark = pytest.mark.slow


@pytest.fixture(params=["postgres", "mariadb"])
def served(request: pytest.FixtureRequest, tmp_path: Path, chromium: Browser) -> Iterator[Project]:
    """The example on a database server, in its own database."""
    url = _service(VARIABLES[request.param])
    name = f"browser_{os.getpid()}"
    with _database(request.param, url, name):
        addresses = {
            "DATABASE_URL": urlunsplit(urlsplit(url)._replace(path=name)),
            "SECOND_DATABASE_URL": f"sqlite:///{tmp_path / 'second.sqlite3'}",
        }
        project = Project(tmp_path, addresses)
        try:
            project.ask(prepared.prepare)
            project.start()
            project.ask(prepared.settle)
            yield project
        finally:
            project.stop()


def test_pages_decisions_and_who_keeps_work_waiting(served: Project, chromium: Browser) -> None:
    with session(served, chromium) as (page, trouble):
        found = chromium.run(survey, page, served.ask(data.addresses))
        chromium.run(_look_and_decide, served, page)
        chromium.run(_choose_the_other_database, served, page)
    assert not trouble, "\n".join(trouble)
    assert {name: each.status for name, each in found.items() if each.status != 200} == {}
    assert {name: each.flaws for name, each in found.items() if each.flaws} == {}


def _look_and_decide(project: Project, page: Page) -> None:
    project.ask(data.begin)
    try:
        opened(page, OVERVIEW)
        blocking = page.get_by_role("table", name="What blocks")
        # MySQL and MariaDB do not tell the table: the transaction stands with the first one.
        is_postgres = project.variables["DATABASE_URL"].startswith("postgres")
        table = "outbox_event" if is_postgres else "outbox_stagedjob"
        expect(blocking.get_by_text(f"In flight on {table}").first).to_be_visible()
    finally:
        project.ask(data.roll_back)
    task_id = project.ask(data.kill_order_anew)
    decide(page, "deadjob", "requeue_selected", task_id)
    said(page, "1 dead job was requeued.")
    project.ask(data.wait_for, "shop.Execution", task_id=task_id, state="SUCCESS")
    assert not project.ask(data.rows, DEAD, "pk", task_id=task_id)


def _choose_the_other_database(project: Project, page: Page) -> None:
    """It is chosen on one page, shown on the next ones, and decided on there alone."""
    pk = project.ask(data.die_in_both, "second")
    content = page.locator("#content")
    opened(page, f"{OVERVIEW}?outbox=default")
    expect(content).to_contain_text("browser.first")
    page.locator(".outbox-databases").get_by_role("link", name="second").click()
    expect(content).to_contain_text("browser.second")
    with page.expect_response(lambda answer: "part=live" in answer.url) as refreshed:
        pass
    assert "outbox=second" in refreshed.value.url
    expect(content).not_to_contain_text("browser.first")

    opened(page, f"/admin/outbox_app/deadjob/{pk}/change/")
    expect(page.locator(".outbox-databases strong")).to_have_text("second")
    expect(content).to_contain_text("on-the-second")
    decide(page, "deadjob", "discard_selected", "on-the-second")
    said(page, "1 dead job was discarded.")
    expect(page.locator(".outbox-databases strong")).to_have_text("second")
    assert project.ask(data.on, "second", DEAD) == []
    assert project.ask(data.on, "default", DEAD) == ["browser.first"]


@contextlib.contextmanager
def _database(server: str, url: str, name: str) -> Iterator[None]:
    with contextlib.closing(_connect(server, url)) as connection:
        cursor = connection.cursor()
        charset = " CHARACTER SET utf8mb4" if server == "mariadb" else ""
        cursor.execute(f"CREATE DATABASE {name}{charset}")
        try:
            yield
        finally:
            force = " WITH (FORCE)" if server == "postgres" else ""
            cursor.execute(f"DROP DATABASE {name}{force}")


def _connect(server: str, url: str) -> Any:
    if server == "postgres":
        import psycopg

        return psycopg.connect(url, autocommit=True)
    import MySQLdb

    parts = urlsplit(url)
    return MySQLdb.connect(
        host=parts.hostname, port=parts.port or 3306, user=unquote(parts.username or ""),
        password=unquote(parts.password or ""), autocommit=True,
    )  # fmt: skip
