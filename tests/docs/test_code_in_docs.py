"""The Python code of the README and of each page runs, in order, in one namespace per page.

A block that cannot run has a comment that no reader sees in the line before it: ``<!-- not run:
REASON -->``. What is staged on a page is rolled back: the page runs inside one transaction.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

import pytest
from celery import Celery, _state
from django.db import transaction
from django.test.utils import isolate_apps

from outbox_app.subscriptions import subscriber

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
    """A page may define a Celery app and shared tasks; nothing of them stays."""
    monkeypatch.setattr(_state, "_apps", WeakSet())
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))
    default, current = _state.default_app, getattr(_state._tls, "current_app", None)
    app = Celery("tests.docs", broker="memory://")  # not an app of another test, finalized by now
    yield
    app.close()
    _state.set_default_app(default)
    _state._set_current_app(current)


@pytest.mark.django_db
@pytest.mark.usefixtures("keep_current_app")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if blocks(page)]
)
def test_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module inside an installed app, so that a page may define models.
    module = types.ModuleType(f"tests.docs.{page.stem}")
    module.__package__ = "tests.docs"
    # A page shows several files of an app; "from .models import …" finds what it has defined.
    for name in (page.stem, "models"):
        monkeypatch.setitem(sys.modules, f"tests.docs.{name}", module)
    monkeypatch.setattr(subscriber, "_subscribers", dict(subscriber._subscribers))
    with isolate_apps("tests"), transaction.atomic():
        for block in blocks(page):
            exec(block, module.__dict__)


def test_pages_are_found() -> None:
    assert ROOT / "docs" / "index.md" in PAGES


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_each_comment_stands_right_before_its_block(page: Path) -> None:
    text = page.read_text()
    comments = len(re.findall(r"^ *<!-- not run:", text, re.MULTILINE))
    assert comments == sum(bool(match["not_run"]) for match in BLOCK.finditer(text))
