"""Several workers of pytest-xdist, each with servers of its own: ``pytest -n auto``.

Sessions, locks and snapshots are those of a whole server, and tests empty brokers: so there are as
many workers as sets of servers (see ``tests.servers.sets``). Tests that share what takes long to
start stay with one worker. A worker that dies, or that hangs where a time limit does not reach it,
costs the test that it was running; another one takes its place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import patience
from tests.servers import sets

#: Groups by the fixture that is started once, or by folder; those that take longest come first.
BY_FIXTURE = {"spark": "spark", "chromium": "browser"}
BY_FOLDER = {"machine": "machine"}
SERVERS = {"POSTGRES_URL", "MARIADB_URL", "MYSQL_URL", "REDIS_URL", "RABBITMQ_URL"}
#: How long a test may go on after its time limit before its worker is ended.
GRACE = float(os.environ.get("OUTBOX_TEST_GRACE", 120))

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[_stderr] = os.dup(2)  # before the output is captured


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[Any]:
    """What is collected stays: looking at it for garbage would take some per cent of a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Each worker loads a part of the modules first: what one has compiled, the others read.

    In a new clone they would compile all of them at the same time otherwise, in the same order.
    """
    worker = getattr(collector.config, "workerinput", None)
    if not isinstance(collector, pytest.Session) or not worker:
        return
    folders = [collector.config.invocation_params.dir / name for name in collector.config.args]
    paths = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    for path in paths[int(worker["workerid"][2:]) :: worker["workercount"]]:
        name = path.relative_to(collector.config.rootpath).with_suffix("")
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it will tell
            importlib.import_module(".".join(name.parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One for each set of servers; none beside servers of your own."""
    if sets.count() > 1:
        return sets.count()
    return 0 if SERVERS & set(os.environ) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Refuse what workers would not say a word about."""
    if SERVERS & set(os.environ) and len(specs) > sets.count():
        raise pytest.UsageError(
            f"{len(specs)} workers need as many sets of servers; try: "
            f"python -m tests.servers --workers {len(specs)} run -- python -m pytest -n auto"
        )
    paths = [argument.partition("::")[0] for argument in config.args]
    if missing := [path for path in paths if not (config.invocation_params.dir / path).exists()]:
        raise pytest.UsageError(f"file or directory not found: {', '.join(missing)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadgroup":
        return None
    from tests.scheduling import Scheduling

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    """Stretch the time limit by the load; end a worker in which a test goes on long after it."""
    result = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, patience(settings.timeout))
    if (stderr := item.config.stash.get(_stderr, None)) is not None:
        seconds = patience(settings.timeout + GRACE)
        faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Iterator[Any]:
    if item.config.stash.get(_stderr, None) is not None:
        faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> Iterator[Any]:
    """Name the groups as ``--dist loadgroup`` reads them; they come first."""
    result = yield
    if _stderr in config.stash:
        groups = {item: group(item) for item in items}
        for item, name in groups.items():
            if name:
                # pytest-xdist 3.8 sets ``_nodeid`` for a mark of the group: pytest 9.2 has none.
                item._id = type(item._id).parse(f"{item.nodeid}@{name}")
        items.sort(key=lambda item: _rank(groups[item]))
        begin = sum(name is not None for name in groups.values())
        items[begin:] = _mixed(items[begin:])
    return result


def _rank(name: str | None) -> int:
    longest = [*BY_FIXTURE.values(), *BY_FOLDER.values()]
    return longest.index(name) if name in longest else len(longest) + (name is None)


def _mixed(items: list[Any]) -> list[Any]:
    """Slow tests, which mostly wait, among others, which compute; the last quarter has none."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    places = {item: 0.75 * n / len(slow) for n, item in enumerate(slow)}
    places |= {item: n / len(others) for n, item in enumerate(others)}
    return sorted(items, key=lambda item: places[item])


def group(item: Any) -> str | None:
    """The group that has to stay together: one with a fixture that it shares, or none."""
    for fixture, name in BY_FIXTURE.items():
        if fixture in item.fixturenames:
            return name
    folder = item.path.parent.name
    if folder in BY_FOLDER:
        return BY_FOLDER[folder]
    definitions = item._fixtureinfo.name2fixturedefs
    scopes = {each[-1].scope for name, each in definitions.items() if name in item.fixturenames}
    if "package" in scopes:
        return folder
    return f"{folder}/{item.path.stem}" if "module" in scopes else None
