"""Run by ``test_workers``: a test that kills its worker, one that hangs, and neighbours."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest


def test_kills_its_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(1)
def test_hangs_where_its_time_limit_does_not_reach_it() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    threading.Event().wait()


@pytest.fixture(scope="module")
def shared() -> str:
    return os.environ["PYTEST_XDIST_WORKER"]


@pytest.mark.parametrize("number", range(4))
def test_stays_with_its_group(shared: str, number: int) -> None:
    note(shared)


@pytest.mark.parametrize("number", range(20))
def test_has_servers(number: int) -> None:
    assert os.environ["OUTBOX_TEST_SET"] in {"first", "second"}


def note(worker: str) -> None:
    with Path(os.environ["OUTBOX_TEST_NOTES"]).open("a") as notes:
        notes.write(f"{worker}\n")
