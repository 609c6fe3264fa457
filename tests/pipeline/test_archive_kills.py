"""An archiver killed at any point, with writers that commit late, roll back and take long: no row
is missing or doubled. A reader by the last id that it has seen fails this test."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import pytest
from django.db import connections
from py4j.protocol import Py4JError

from outbox_app.events.models import Event
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.session import reason
from tests.events.log.harness import Writer, traps
from tests.events.log.sessions import Session, truncate
from tests.faults.tools import ROOT, eventually, on
from tests.patience import SECONDS, patience
from tests.servers import processes

from .harness import (
    POINTS,
    archive,
    archived,
    assert_exact,
    killing,
    leftovers,
    logged,
    publish_some,
    source,
)
from .local_context import LocalContext, Partitions

pytestmark = pytest.mark.django_db(transaction=True)

#: How often two archivers are raced; a hundred times by hand.
RACES = int(os.environ.get("ARCHIVE_RACES", "3"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "archive"


class Naive:
    """Reads what has a higher id than the last one, a few rows at a time."""

    patience = 0.0

    def __init__(self, alias):
        self.alias = alias
        self.rows = []

    def poll(self):
        after = max((id for id, _ in self.rows), default=0)
        events = Event.objects.using(self.alias).filter(id__gt=after).order_by("id")
        self.rows += events.values_list("id", "stream")[:7]

    def streams(self):
        return {stream for _, stream in self.rows}


class Killable:
    """Archives, and is killed at one point after the other, sooner or later."""

    patience = SECONDS

    def __init__(self, alias, folder, dice):
        options = json.dumps(asdict(source(alias)))
        command = [sys.executable, "-m", "tests.pipeline.archiver", options, str(folder), "7"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self.folder = folder
        self.dice = dice
        self.points = cycle(dice.sample(POINTS, len(POINTS)))
        self.killed = Counter()

    def poll(self):
        point = next(self.points)
        self.killed[point] += self.run(point, self.dice.choice([0, 0, 1, 3])) == "killed"

    def run(self, point, passes=0):
        answer = self.ask(point, passes)
        assert answer in ("done", "killed"), answer
        return answer

    def ask(self, point, passes=0):
        self.process.stdin.write(f"{point} {passes}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def streams(self):
        with suppress(Exception):
            return {row[3] for row in archived(self.folder)}
        return set()

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(patience(SECONDS)) == 0


class Under:
    """What ``traps`` listens with."""

    def __init__(self, reader):
        self.reader = reader
        self.poll = reader.poll

    def hears(self, stream, seconds=1.0):
        """Poll until the stream came. A naive reader may not get there: the clock decides."""
        deadline = time.monotonic() + max(seconds, patience(self.reader.patience))
        while stream not in self.reader.streams() and time.monotonic() < deadline:
            self.poll()


def under_fire(alias, reader, *, seed):
    """Have a reader read while others write in every way there is."""
    truncate(alias)
    traps(alias, Under(reader))
    threads = [Writer(alias, number, count=12, seed=seed) for number in range(4)]
    publish_some(alias, 1)
    for thread in threads:
        thread.all = threads
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            reader.poll()
    finally:
        for thread in threads:
            thread.join(patience())
    assert [thread.error for thread in threads] == [None] * 4


@on("postgres", "mariadb")
def test_killed_again_and_again_while_others_write(alias, new_log, folder):
    reader = Killable(alias, folder, random.Random(alias))
    try:
        under_fire(alias, reader, seed=4)
        for point in POINTS:
            publish_some(alias, 40)
            reader.killed[point] += reader.run(point) == "killed"
        assert set(+reader.killed) == set(POINTS)
        assert reader.run("none") == "done"
    finally:
        reader.close()
    assert_exact(alias, folder)
    assert sum(reader.killed.values()) > len(POINTS)


@on("postgres", "mariadb")
def test_the_last_id_loses_rows(alias, new_log):
    reader = Naive(alias)
    under_fire(alias, reader, seed=4)
    committed = set(Event.objects.using(alias).values_list("id", flat=True))
    while len(reader.rows) < len(reader.poll() or reader.rows):
        pass
    assert committed - {id for id, _ in reader.rows}


@on("default")
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_point(alias, new_log, folder, point, monkeypatch):
    monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 3)
    publish_some(alias, 40)
    with killing(point, 2) as killed:
        archive(alias, folder)
    assert killed.left == 0
    whole = {row[0] for row in archived(folder)}
    publish_some(alias, 10)
    archive(alias, folder)
    assert_exact(alias, folder)
    assert whole < {row[0] for row in archived(folder)}


@on("default")
def test_two_archivers_are_raced(alias, new_log, folder):
    """One of them loses and ends; each row is there once."""
    both = [Killable(alias, folder, random.Random(n)) for n in range(2)]
    lost = 0
    try:
        with ThreadPoolExecutor(2) as pool:
            for _ in range(RACES):
                publish_some(alias, 30)
                answers = [each.result() for each in [pool.submit(r.ask, "none") for r in both]]
                assert set(answers) <= {"done", "failed 1"}
                assert "done" in answers
                lost += "failed 1" in answers
                assert sorted(archived(folder)) == logged(alias)
    finally:
        for reader in both:
            reader.close()
    assert lost or RACES < 10
    assert_exact(alias, folder)


@on("default")
def test_an_attempt_that_was_made_twice_counts_once(alias, new_log, folder):
    """A slow task is started a second time elsewhere; both write, and one is believed."""

    class Twice(Partitions):
        def map(self, function):
            super().map(function)
            return super().map(function)

    class Speculative(LocalContext):
        def parallelize(self, parts, count):
            return Twice(super().parallelize(parts, count).parts)

    publish_some(alias, 10)
    archive(alias, folder, session=Speculative())
    assert leftovers(folder) == set()  # the same rows are the same file
    publish_some(alias, 1)
    archive(alias, folder)
    assert_exact(alias, folder)


@on("postgres")
def test_workers_are_killed_in_the_middle_of_their_tasks(
    alias, new_log, folder, spark, monkeypatch
):
    """A lock holds their tasks up. Spark gives the batch up here; with retries it does not."""
    publish_some(alias, 4000)
    archive(alias, folder, session=spark, rows=3000)  # so that there are workers
    publish_some(alias, 6000)

    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox_event'::regclass"

    def kill():
        eventually(lambda: holder.sql(f"{waiting} AND NOT granted") == [(2,)], "tasks that wait")
        for pid in workers(int(connections[alias].settings_dict["PORT"])):
            os.kill(pid, signal.SIGKILL)
        holder.rollback()

    def spread(*arguments, original=Archiver._spread):
        monkeypatch.undo()
        holder.begin().sql("LOCK TABLE outbox_event IN ACCESS EXCLUSIVE MODE")
        killer = other.submit(kill)
        try:
            return original(*arguments)
        finally:
            killer.result(patience())

    with Session(alias) as holder, ThreadPoolExecutor(1) as other:
        monkeypatch.setattr(Archiver, "_spread", spread)
        with pytest.raises(Py4JError) as failed:
            archive(alias, folder, session=spark, rows=3000)
    assert "Python worker exited unexpectedly" in reason(failed.value)
    assert "\n" not in reason(failed.value)
    assert archive(alias, folder, session=spark, rows=3000) == 6000
    assert_exact(alias, folder)


def workers(port):
    """Return the processes of this test's Spark that read the database: their tasks are not done.

    Spark finds an idle one that was killed too late, and fails a task of another test.
    """
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    sockets = {f"socket:[{each[9]}]" for each in lines if each[2].endswith(f":{port:04X}")}
    found = []
    for pid in processes.process_tree(os.getpid()):
        is_worker = b"tests.pipeline.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
        if is_worker and sockets & {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}:
            found.append(pid)
    return found
