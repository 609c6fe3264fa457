"""The Python code of the README and of each page runs, in order, in one namespace per page.

A block that cannot run has an invisible comment in the line before it: ``<!-- not run: REASON
-->``. Each page runs inside one transaction, which is rolled back with its staged jobs.

A page on prepared events has an alias "billing", with a table of fences. It runs as in a
``TestCase``, whose transactions do not count as the caller's.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import pytest
from celery import Celery, _state
from django.db import connections, transaction
from django.test.utils import isolate_apps

from outbox_app.events.subscriptions import subscriber
from outbox_app.prepared import fences
from outbox_app.prepared.models import Fence
from tests.fleet.conftest import begin_anew

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<not_run> *<!-- not run: \S.* -->\n)?"
    r"^(?P<indent> *)```python\n(?P<code>(?s:.*?))^(?P=indent)```$",
    re.MULTILINE,
)


def blocks(page: Path) -> list[types.CodeType]:
    """The compiled blocks; their line numbers are those of the page."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        code = match["code"].replace(f"\n{match['indent']}", "\n").removeprefix(match["indent"])
        if not match["not_run"]:
            line = text.count("\n", 0, match.start("code"))
            found.append(compile("\n" * line + code, str(page), "exec"))
    return found


@pytest.fixture
def keep_current_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the Celery app and the shared tasks that a page defines."""
    monkeypatch.setattr(_state, "_apps", WeakSet())
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    default, current = _state.default_app, getattr(_state._tls, "current_app", None)
    app = Celery("tests.docs", broker="memory://")  # not an app of another test, finalized by now
    yield
    app.close()
    _state.set_default_app(default)
    _state._set_current_app(current)


@contextmanager
def billing(folder: Path) -> Iterator[None]:
    """A database of business rows, as a ``TestCase`` has it: in a transaction."""
    connections.settings["billing"] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(folder / "billing.sqlite3"),
        "OPTIONS": {},
    }
    tests = transaction.atomic(using="billing")
    tests._from_testcase = True
    try:
        connections["billing"].connect()  # which Django's TestCase would refuse of a query
        with connections["billing"].schema_editor() as editor:
            editor.create_model(Fence)
        with tests:
            yield
            transaction.set_rollback(True, using="billing")  # or its callbacks would be called
    finally:
        connections["billing"].close()
        del connections["billing"], connections.settings["billing"]


@pytest.mark.django_db
@pytest.mark.usefixtures("keep_current_app")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page)]
)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module inside an installed app, so that a page may define models.
    module = types.ModuleType(f"tests.docs.{page.stem}")
    module.__package__ = "tests.docs"
    # A page shows several files of an app; "from .models import …" finds what it has defined.
    for name in (page.stem, "models"):
        monkeypatch.setitem(sys.modules, f"tests.docs.{name}", module)
    monkeypatch.setattr(subscriber, "_subscribers", dict(subscriber._subscribers))
    monkeypatch.setattr(fences, "_functions", list(fences._functions))
    prepares = "outbox_app.prepared import" in page.read_text()
    try:
        with isolate_apps("tests"), billing(tmp_path) if prepares else transaction.atomic():
            for block in blocks(page):
                exec(block, module.__dict__)
    finally:
        begin_anew()  # a page that asks for servers has begun to watch them


def test_pages_are_found() -> None:
    assert ROOT / "docs" / "index.md" in PAGES


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_each_comment_stands_right_before_its_block(page: Path) -> None:
    text = page.read_text()
    comments = len(re.findall(r"^ *<!-- not run:", text, re.MULTILINE))
    assert comments == sum(bool(match["not_run"]) for match in BLOCK.finditer(text))
