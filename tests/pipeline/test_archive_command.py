"""``manage.py outbox_pipeline archive`` as a real process: on this machine, on a small cluster,
killed by SIGKILL, and told to end."""

from __future__ import annotations

import signal
import sys

import pytest

from tests.faults.tools import PATIENCE, ROOT
from tests.servers import processes

from .harness import assert_exact, entries, publish_some

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start(environment, tmp_path):
    """``start(alias, *arguments, **variables)``: the command as a process of its own."""
    started = []

    def run(alias, *arguments, **variables):
        log = tmp_path / f"command-{len(started)}.log"
        command = [sys.executable, ROOT / "manage.py", "outbox_pipeline", "archive"]
        command += ["--to", "archive", "--max-rows-per-batch", "3000", *arguments]
        process = processes.spawn(
            [str(word) for word in command],
            log=log,
            folder=tmp_path,
            environment={**environment(alias), **variables},
            user=None,
        )
        process.log = log
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            processes.kill_trees([process.pid])
        process.wait()
        processes.forget_process(process.pid)


@pytest.mark.parametrize(
    ("alias", "point", "master"),
    [
        pytest.param("postgres", "archive_copied", "local-cluster[2,1,1024]", id="postgres"),
        pytest.param("mariadb", "archive_committed", "local[2,4]", id="mariadb"),
    ],
    indirect=["alias"],
)
def test_killed_and_started_again(alias, new_log, start, tmp_path, point, master):
    """The folder is a relative one, and the executors of a cluster have working folders."""
    publish_some(alias, 4000)
    killed = start(alias, "--master", "local[2]", OUTBOX_FAILPOINT=f"{point}=kill@2")
    assert killed.wait(PATIENCE * 2) == -signal.SIGKILL, killed.log.read_text()
    so_far = len(entries(tmp_path / "archive"))
    assert so_far == {"archive_copied": 1, "archive_committed": 2}[point]
    publish_some(alias, 4000)
    again = start(alias, "--available-now", "--master", master)
    assert again.wait(PATIENCE * 2) == 0, again.log.read_text()
    said = again.log.read_text()
    assert f"done log=outbox_event archived={8000 - [0, 3000, 4000][so_far]} to=archive" in said
    assert_exact(alias, tmp_path / "archive")
