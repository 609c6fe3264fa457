"""The style of the package: sizes, docstrings, names."""

from __future__ import annotations

import ast
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]
LINES = {path: len(path.read_text().splitlines()) for path in MODULES}


def offenders(rule: Callable[[Path], object]) -> dict[str, object]:
    """What a rule finds wrong, by module."""
    found = {str(path.relative_to(ROOT)): rule(path) for path in MODULES}
    return {path: wrong for path, wrong in found.items() if wrong}


def test_no_module_is_above_400_lines() -> None:
    assert {str(path): lines for path, lines in LINES.items() if lines > 400} == {}


def test_half_of_the_modules_have_at_most_130_lines() -> None:
    assert statistics.median(LINES.values()) <= 130


def test_nine_of_ten_modules_have_at_most_280_lines() -> None:
    assert sorted(LINES.values())[math.ceil(0.9 * len(LINES)) - 1] <= 280


#: What such a module holds is known from its name: one line does.
KNOWN_BY_NAME = {"__init__.py", "admin.py", "apps.py", "checks.py", "models.py", "signals.py"}
KNOWN_BY_NAME |= {"base.py", "conf.py", "counters.py", "doors.py", "exceptions.py"}


def test_modules_open_with_what_they_promise() -> None:
    def wrong(path: Path) -> str:
        if path.name == "__init__.py" and "management" in path.parts:
            return ""
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        # A drawing, such as the tree of exceptions.py, may be longer.
        text = re.sub(r"\n::\n.*?(?=\n\S|\Z)", "", docstring, flags=re.DOTALL)
        least = 1 if path.name in KNOWN_BY_NAME else 3
        most = math.inf if path.parent.name == "commands" else 12  # a command's is its help
        fits = len(docstring.splitlines()) >= least and len(text.splitlines()) <= most
        return "" if fits else f"a docstring has {least} to {most} lines"

    assert offenders(wrong) == {}


def test_modules_are_named_by_nouns() -> None:
    def wrong(path: Path) -> bool:
        name = path.parent.name if path.name == "__init__.py" else path.stem
        return name in {"utils", "util", "common", "helpers", "misc"}

    assert offenders(wrong) == {}


def test_names_say_what_a_value_is() -> None:
    """A participle such as ``given`` says how a value came here, not what it is."""
    participles = {"said", "told", "given", "looked"}

    def wrong(path: Path) -> list[str]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        names += [node.arg for node in nodes if isinstance(node, ast.arg)]
        return [name for name in names if name.strip("_").lower() in participles]

    assert offenders(wrong) == {}


def test_fixtures_are_of_a_folder_or_of_all() -> None:
    """No conftest imports another: what folders share is a plugin in ``tests/fixtures``."""
    another = re.compile(r"^(from|import) \S*conftest\b", re.MULTILINE)
    paths = sorted((ROOT / "tests").rglob("conftest.py"))
    assert [str(path) for path in paths if another.search(path.read_text())] == []


def test_modules_do_not_print() -> None:
    def wrong(path: Path) -> list[int]:
        nodes = ast.walk(ast.parse(path.read_text()))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        return [call.lineno for call in calls if getattr(call.func, "id", None) == "print"]

    assert offenders(wrong) == {}


def test_what_modules_say_is_escaped() -> None:
    """Loggers come from ``get_logger``; commands write with ``OutboxCommand.write``."""

    def wrong(path: Path) -> bool:
        text = path.read_text()
        logs = path != PACKAGE / "text.py" and "getLogger" in text
        return logs or (
            path.parent.name == "commands" and bool(re.search(r"self\.std(out|err)", text))
        )

    assert offenders(wrong) == {}


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
