"""``manage.py outbox_pipeline archive`` as a real process: killed with SIGKILL, ended by a signal.

``test_cluster`` does the same on a cluster.
"""

from __future__ import annotations

import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from outbox_app.pipeline.archiver import Archiver
from tests.faults.tools import ROOT, eventually, on
from tests.patience import SECONDS, patience
from tests.servers import processes

from .harness import archive, assert_exact, entries, publish_some, tree

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start(environment, tmp_path):
    """``start(alias, *arguments, **variables)``: start the command as a process."""
    started = []

    def run(alias, *arguments, **variables):
        log = tmp_path / f"command-{len(started)}.log"
        command = [sys.executable, str(ROOT / "manage.py"), "outbox_pipeline", "archive"]
        command += ["--to", "archive", "--max-rows-per-batch", "3000", *arguments]
        variables = {**environment(alias), **variables}
        process = processes.spawn(
            command, log=log, folder=tmp_path, environment=variables, user=None
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@on("mariadb")
def test_killed_and_started_again_until_told_to_end(alias, new_log, start, tmp_path):
    publish_some(alias, 4000)
    killed = start(alias, "--master", "local[2]", OUTBOX_FAILPOINT="archive_committed=kill@2")
    assert killed.wait(patience(SECONDS * 2)) == -signal.SIGKILL, killed.log.read_text()
    publish_some(alias, 4000)
    assert len(entries(tmp_path / "archive")) == 2
    again = start(alias, "--follow", "--interval", "0.1", "--master", "local[2,4]")
    eventually(lambda: "total=8000" in again.log.read_text(), "the rest", SECONDS * 2)
    publish_some(alias, 4000)
    eventually(lambda: "total=11000" in again.log.read_text(), "what came later")
    again.send_signal(signal.SIGTERM)
    assert again.wait(patience(SECONDS)) == 0, again.log.read_text()
    archive(alias, tmp_path / "archive", rows=3000)
    assert_exact(alias, tmp_path / "archive")


def refused(*arguments):
    with pytest.raises(CommandError) as raised:
        call_command("outbox_pipeline", "archive", *arguments)
    assert raised.value.returncode == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


@on("default")
def test_what_cannot_be_done_is_said_in_one_line(alias, new_log, spark, tmp_path):
    publish_some(alias, 5)
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    archive(alias, ours)
    theirs.mkdir()
    (theirs / "letter.txt").write_text("dear")
    assert "no archive, and not empty (it has 'letter.txt')" in refused("--to", str(theirs))
    assert list(tree(theirs)) == ["letter.txt"]
    commit = max((ours / "_delta_log").glob("0*.json"))
    content = commit.read_text()
    commit.write_text(content[:-9])
    assert "its Delta log is invalid" in refused("--to", str(ours))
    assert "Expected a path" in refused("--to", "nowhere://else")
    (tmp_path / "file").touch()
    assert "File exists" in refused("--to", str(tmp_path / "file"))
    commit.write_text(content)
    assert "is the archive of the log" in refused("--to", str(ours), "--log", "own_log_visit")


@on("default")
def test_a_database_without_the_log(alias, new_log, spark, tmp_path):
    name = str(tmp_path / "empty.sqlite3")
    Path(name).touch()
    connections.settings["empty"] = {**connections.settings[alias], "NAME": name}
    try:
        said = refused("--to", str(tmp_path / "archive"), "--database", "empty")
    finally:
        connections["empty"].close()
        del connections["empty"], connections.settings["empty"]
    assert "There is no table 'outbox_event'" in said


@on("default")
def test_a_task_that_fails_says_why(alias, new_log, spark, tmp_path, monkeypatch):
    """What a worker of Spark has raised comes out as one line."""
    publish_some(alias, 5)
    make, today = Archiver._copied, f"recorded_date={datetime.now(UTC):%Y-%m-%d}"

    def batch(self, *arguments):
        (tmp_path / "archive" / today).touch()  # a file, where a folder has to be
        return make(self, *arguments)

    monkeypatch.setattr(Archiver, "_copied", batch)
    assert today in refused("--to", str(tmp_path / "archive"))
    monkeypatch.undo()
    (tmp_path / "archive" / today).unlink()
    call_command("outbox_pipeline", "archive", "--to", str(tmp_path / "archive"))
    assert_exact(alias, tmp_path / "archive")
