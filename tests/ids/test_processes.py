"""Ids of processes that fork, are stopped, have wrong clocks, and start at once are all unique.

``OUTBOX_IDS=10000000`` makes so many ids, in 64 processes.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import subprocess
import sys
from array import array
from datetime import UTC, datetime

import pytest

from outbox_app.ids import parts_of, snowflake
from outbox_app.ids.models import Node
from tests import forking
from tests.faults.tools import ROOT, on
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

COUNT = int(os.environ.get("OUTBOX_IDS", "0"))
PROCESSES, EACH = (64, COUNT // 64) if COUNT else (12, 10_000)


def ids_in(file):
    found = array("Q")
    found.frombytes(file.read_bytes())
    return found


@pytest.mark.timeout(600)
@on("postgres", "mariadb")
def test_no_id_comes_twice(alias, nodes, environment, tmp_path):
    command = [sys.executable, "-m", "tests.ids.maker", str(tmp_path), str(PROCESSES), str(EACH)]
    forking.run(command, cwd=ROOT, env=environment(alias), timeout=patience(400), check=True)
    made, owners = [], {}
    for file in sorted(tmp_path.iterdir()):
        own = ids_in(file)
        assert list(own) == sorted(own)
        made.extend(own)
        # One node at least for each process, and no millisecond of it is another one's.
        who = "parent" if file.name.startswith(("preloaded", "thread")) else file.name
        for id in own:
            assert owners.setdefault(id >> 12, who) == who
    assert len(made) >= (PROCESSES + 4) * EACH
    assert len(set(made)) == len(made)
    given_back = Node.objects.using(alias).filter(owner=None, reserved_ms__gt=0).count()
    assert given_back >= PROCESSES / 2


@on("postgres")
def test_the_clock_of_the_host_is_not_asked(alias, nodes, environment):
    library = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    if not library:
        pytest.skip("no libfaketime")
    wrong = {
        "LD_PRELOAD": library[0],
        "FAKETIME": "-2h",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
    }
    code = "import django; django.setup(); from outbox_app.ids import snowflake; print(snowflake())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(alias) | wrong,
        capture_output=True,
        text=True,
        timeout=patience(),
    )
    assert done.returncode == 0, done.stderr
    assert abs(parts_of(int(done.stdout)).time - datetime.now(UTC)).total_seconds() < patience()
    # It ended as processes do, and gave its node back.
    assert Node.objects.using(alias).filter(owner=None, reserved_ms__gt=0).count() == 1


def test_a_child_of_multiprocessing_gives_its_node_back(alias, nodes, settings):
    """A pool whose processes are replaced would soon have taken all nodes."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    child = multiprocessing.get_context("fork").Process(target=snowflake)
    child.start()
    child.join(patience(20))
    assert child.exitcode == 0
    used = Node.objects.using(alias).filter(reserved_ms__gt=0)
    assert [node.owner for node in used] == [None]


BYE = """
import django; django.setup()
from outbox_app.ids import snowflake
print(snowflake(), flush=True)
input()
"""


@on("postgres", "mariadb")
def test_a_process_ends_while_the_database_does_not_answer(alias, nodes, environment, proxy):
    """A worker of Celery, for which the others wait, did not end at all."""
    variable = f"{alias.upper()}_URL"
    link, url = proxy(environment(alias)[variable])
    variables = {**environment(alias), variable: url, "OUTBOX_LEASE_SECONDS": "1"}
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BYE], cwd=ROOT, env=variables, **pipe) as process:
        try:
            assert int(process.stdout.readline())
            link.mode = "blackhole"
            process.communicate("\n", timeout=patience(20))
            assert process.returncode == 0
        finally:
            process.kill()
    assert Node.objects.using(alias).exclude(owner=None).exists()
