"""The pytest fixture ``outbox``, and a report of what the detector found in the tests.

The fixture has the names of ``outbox_app.testing`` and of the module ``testing`` of each installed
app. pytest loads this module in every run, before Django is configured, so it imports nothing but
pytest. A test's marks decide whether it may use the
database. With pytest-xdist the findings of the workers are reported together.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

_DETECTOR = "outbox_app.jobs.staging.detector"
_of_workers: list[Any] = []
_looked_at_by_workers: list[int] = []


@pytest.fixture
def outbox() -> Iterator[SimpleNamespace]:
    """``outbox.assert_staged(…)``, ``outbox.run_staged()``: see ``outbox_app.testing``."""
    names: dict[str, Any] = {}
    for app in import_module("outbox_app.capability").capabilities():
        if find_spec(f"{app.name}.testing"):
            module = import_module(f"{app.name}.testing")
            names |= {name: getattr(module, name) for name in module.__all__}
    with names.get("in_one_thread", nullcontext)():
        yield SimpleNamespace(**names)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("outbox_app").addoption(
        "--outbox-detect",
        choices=["log", "warn", "raise"],
        help="report tasks that are sent inside a transaction, and on_commit callbacks that can be "
        "lost; warn: with a warning at the line; raise: the call fails",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if detect := session.config.getoption("outbox_detect"):
        import_module(_DETECTOR).install(detect)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["outbox_found"] = _findings()
        session.config.workeroutput["outbox_looked_at"] = _looked_at()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    output = getattr(node, "workeroutput", {})
    _of_workers.extend(output.get("outbox_found", []))
    _looked_at_by_workers.append(output.get("outbox_looked_at", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not (findings := _findings() + _of_workers):
        if terminalreporter.config.getoption("outbox_detect"):
            calls = _looked_at() + sum(_looked_at_by_workers)
            terminalreporter.section("tasks sent inside a transaction")
            terminalreporter.line(f"None found. Calls of tasks that were looked at: {calls}")
        return
    detector = import_module(_DETECTOR)
    sent: Counter[Any] = Counter()
    late: Counter[Any] = Counter()
    for is_late, place, count in findings:
        if is_late:
            late[detector.LateCallback(*place)] += count
        else:
            sent[detector.Finding(*place)] += count
    for title, lines in (
        ("tasks sent inside a transaction", detector.report(sent)),
        ("on_commit callbacks that are lost if they fail", detector.report_callbacks(late)),
    ):
        for number, line in enumerate(lines):
            if not number:
                terminalreporter.section(title)
            terminalreporter.line(line)


def _looked_at() -> int:
    """Return how many calls of tasks the detector has seen in this process."""
    detector = sys.modules.get(_DETECTOR)
    return 0 if detector is None else detector.looked_at


def _findings() -> list[Any]:
    """Return this process's findings as plain values, which can be sent to another process."""
    detector = sys.modules.get(_DETECTOR)
    if detector is None:
        return []
    return [
        [found is detector.late, list(place), count]
        for found in (detector.found, detector.late)
        for place, count in found.items()
    ]
