"""The project, the browser, and pages of it that fail a test when anything goes wrong on them.

A test that takes ``page`` runs in the browser's thread. Where there is no Chromium it is skipped on
a laptop and fails in CI.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.install import find_program

from . import data, prepared
from .project import ROOT, Project
from .survey import Seen, survey
from .window import Browser, Watch

#: Fixtures that a test may touch in the browser's thread only.
OF_THE_BROWSER = {"page", "open_page"}


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    program = find_program("chromium-headless-shell")
    if program is None:
        reason = "there is no chromium-headless-shell; as root: make system"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture(scope="package")
def project(tmp_path_factory: pytest.TempPathFactory, chromium: Browser) -> Iterator[Project]:
    """The example, running, with the rows of ``prepared.prepare``."""
    project = Project(tmp_path_factory.mktemp("example"))
    try:
        project.ask(prepared.prepare)
        project.start()
        project.ask(prepared.settle)
        yield project
    finally:
        project.stop()


@pytest.fixture(scope="package")
def seen(project: Project, chromium: Browser) -> dict[str, Seen]:
    """All pages, as a superuser sees them."""
    with session(project, chromium) as (page, trouble):
        found = chromium.run(survey, page, project.ask(data.addresses))
    assert not trouble, "\n".join(trouble)
    return found


@pytest.fixture
def open_page(project: Project, chromium: Browser) -> Iterator[Callable[..., Any]]:
    """``open_page(permissions=None, **options)``: a page of a new session.

    Without ``permissions`` the user is a superuser; with ``permissions=()`` staff without any. An
    error on the page fails the test, until ``page.watch.end()``.
    """
    with contextlib.ExitStack() as sessions:
        troubles = []

        def make(permissions: tuple[str, ...] | None = None, **options: Any) -> Any:
            opened = session(project, chromium, permissions, **options)
            page, trouble = sessions.enter_context(opened)
            troubles.append(trouble)
            return page

        yield make
    project.ask(data.sweep)
    trouble = [each for each_trouble in troubles for each in each_trouble]
    assert not trouble, "\n".join(trouble)


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    """A page of a superuser."""
    return open_page()


@pytest.fixture
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of screenshots: that of ``make screenshots``, else a folder of this run."""
    folder = os.environ.get("SCREENSHOTS")
    return ROOT / folder if folder else tmp_path_factory.mktemp("pictures")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in the browser's thread if it takes a page."""
    if not OF_THE_BROWSER & set(pyfuncitem.fixturenames):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.funcargs["chromium"].run(pyfuncitem.obj, **arguments)
    return True


@contextlib.contextmanager
def session(
    project: Project,
    chromium: Browser,
    permissions: tuple[str, ...] | None = None,
    **options: Any,
) -> Iterator[tuple[Any, list[str]]]:
    """A page of somebody who is logged in, and what goes wrong on it."""
    name = "demo" if permissions is None else f"with {', '.join(permissions)}"[:150]
    asked = None if permissions is None else list(permissions)
    cookie = project.ask(data.session, name, asked)
    context = chromium.run(chromium.context, project.url, **options)
    try:
        watch = chromium.run(Watch, context, project.url)
        chromium.run(context.add_cookies, [{**cookie, "url": project.url}])
        page = chromium.run(context.new_page)
        page.watch = watch
        yield page, watch.trouble
    finally:
        chromium.run(context.close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that need the project last, so that it does not run beside all the others."""
    last: dict[pytest.Item, None] = {}
    for item in items:
        names = set(getattr(item, "fixturenames", ()))
        if "chromium" in names:
            # The first one starts everything.
            item.add_marker(pytest.mark.timeout(400))
        if "project" in names:
            last[item] = None
    items[:] = [*(item for item in items if item not in last), *last]
