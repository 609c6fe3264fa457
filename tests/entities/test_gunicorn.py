"""Under gunicorn: threads of a worker share batches, and preloading the app does no harm."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

from tests import forking
from tests.patience import eventually, patience
from tests.servers.ports import free_port

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True),
]


@pytest.fixture
def served(alias, account, environment, tmp_path):
    """The address of a gunicorn with four workers that are forked from a preloaded parent."""
    port = free_port()
    command = ["gunicorn", "--preload", "--workers", "4", "--worker-class", "gthread"]
    command += ["--threads", "4", "--bind", f"127.0.0.1:{port}", "tests.entities.wsgi:application"]
    with (tmp_path / "log").open("w") as log:
        process = forking.Popen(
            [sys.executable, "-m", *command],
            env={**environment(alias), "ALIAS": alias},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}/{alias}"

    def answers():
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return urlopen(f"{address}/first", timeout=patience(10)).status == 200
        except OSError:
            return False

    try:
        eventually(answers)
        yield address
        process.terminate()
        process.wait(patience(30))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_workers_of_a_preloaded_application_answer_all(served, rows):
    def ask(number):
        with urlopen(f"{served}/c{number % 100}", timeout=patience(60)) as response:
            return json.load(response)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(150)))
    versions = [version for version, *_ in rows()]
    assert versions == list(range(1, 104))  # opened, preloaded, first, and a hundred
    assert {answer["version"] for answer in answers} == set(versions[3:])
    assert sum(not answer["replayed"] for answer in answers) == 100
    assert len({answer["pid"] for answer in answers}) > 1
