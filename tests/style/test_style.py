"""How the package reads: sizes, docstrings, names, documented settings."""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_app.conf import OutboxSettings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]
LINES = {path: len(path.read_text().splitlines()) for path in MODULES}

each_module = pytest.mark.parametrize(
    "path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in MODULES]
)


def test_no_module_is_above_400_lines() -> None:
    assert {str(path): lines for path, lines in LINES.items() if lines > 400} == {}


def test_half_of_the_modules_have_at_most_130_lines() -> None:
    assert statistics.median(LINES.values()) <= 130


def test_nine_of_ten_modules_have_at_most_280_lines() -> None:
    assert sorted(LINES.values())[math.ceil(0.9 * len(LINES)) - 1] <= 280


@each_module
def test_module_opens_with_what_it_promises(path: Path) -> None:
    if path.name == "__init__.py" and "management" in path.parts:
        return
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, "no docstring"
    assert len(docstring.splitlines()) >= (1 if path.name == "__init__.py" else 3)
    # A drawing, such as the tree of exceptions.py, may be longer.
    text = re.sub(r"\n::\n.*?(?=\n\S|\Z)", "", docstring, flags=re.DOTALL)
    assert len(text.splitlines()) <= 12


@each_module
def test_module_is_named_by_a_noun(path: Path) -> None:
    name = path.parent.name if path.name == "__init__.py" else path.stem
    assert name not in {"utils", "util", "common", "helpers", "misc"}


@each_module
def test_module_does_not_print(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if getattr(call.func, "id", None) == "print"]


@each_module
def test_what_the_module_says_is_escaped(path: Path) -> None:
    """Loggers come from ``get_logger``; commands write with ``TeachingCommand.write``."""
    text = path.read_text()
    assert path == PACKAGE / "text.py" or "getLogger" not in text
    assert path.parent.name != "commands" or not re.search(r"self\.std(out|err)", text)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(OutboxSettings)])
def test_setting_is_documented(name: str) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert re.search(rf"^#+ `{name}`$", page, flags=re.MULTILINE), "give it a heading of its own"


def test_every_documented_setting_exists() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    documented = re.findall(r"^#+ `([A-Z_]+)`$", page, flags=re.MULTILINE)
    assert set(documented) <= {field.name for field in dataclasses.fields(OutboxSettings)}


def test_import_needs_neither_django_nor_celery() -> None:
    code = "import sys, outbox_app; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert "outbox_app" in output.split()
    assert not {"celery", "django", "kombu"} & set(output.split())


def test_celery_app_can_be_defined_before_django_is_set_up() -> None:
    """A project's ``__init__`` imports its Celery app while Django is reading the settings."""
    code = "from outbox_app.celery import OutboxCelery; OutboxCelery('shop')"
    environment = {key: value for key, value in os.environ.items() if "DJANGO" not in key}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
