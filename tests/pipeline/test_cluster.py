"""A standalone cluster whose machines are lost or hang: the archive equals the log.

The commands come from the page of the how-to. ``CLUSTER_FULL=1`` kills the driver at each point of
a batch, and also runs on MariaDB.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
from django.db import connections
from pyarrow import parquet

from outbox_app.events.models import Event
from tests.events.log.sessions import Session
from tests.faults.tools import ROOT, eventually, on
from tests.patience import SECONDS, patience
from tests.servers import processes
from tests.servers.mysql import MARIADB

from .cluster import Cluster
from .harness import POINTS, assert_exact, entries, logged, publish_some
from .rebuilds import damage, projection, rebuilt, rows, run, work

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

PAGE = ROOT / "docs" / "howto" / "spark-cluster.md"
FULL = "CLUSTER_FULL" in os.environ

#: How a test locks the log, unlocks it, and counts who waits.
LOCKS = {
    "postgres": (
        "LOCK TABLE outbox_event IN ACCESS EXCLUSIVE MODE",
        "ROLLBACK",
        "SELECT count(*) FROM pg_locks WHERE relation = 'outbox_event'::regclass AND NOT granted",
    ),
    MARIADB: (
        "LOCK TABLES outbox_event WRITE",
        "UNLOCK TABLES",
        "SELECT count(*) FROM information_schema.processlist "
        "WHERE state LIKE 'Waiting for table%%' AND info LIKE '%%outbox_event%%'",
    ),
}


@pytest.fixture
def cluster(alias, environment, tmp_path):
    password = tmp_path / "password"
    password.write_text(str(connections[alias].settings_dict.get("PASSWORD") or ""))
    with Cluster(tmp_path / "cluster", environment(alias)) as cluster:
        yield cluster


@pytest.fixture
def typed(cluster, tmp_path):
    """``typed("spark-submit", "--option …", **variables)``: start the page's command of that name.

    The fixture replaces only names of the page, such as addresses and paths, by the test's.
    """
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ours = {
        "spark://spark.example:7077": cluster.url,
        "s3://shop-archive/log": "archive",  # executors have working folders of their own
        "/run/secrets/outbox": str(tmp_path / "password"),
        "spark.executor.memory=2g": "spark.executor.memory=512m",
        "shop.settings": "tests.settings",
    }

    def start(program, options="", **variables):
        [block] = [each for each in blocks if f"$ {program} " in each]
        command = re.sub(r"^\$ ", "", block, flags=re.MULTILINE).strip()
        for theirs, our in ours.items():
            assert theirs in command or theirs == "shop.settings"
            command = command.replace(theirs, our)
        return cluster.run(f"{command} --max-rows-per-batch 3000 {options}", **variables)

    return start


@on("postgres", *(["mariadb"] if FULL else []))
@pytest.mark.parametrize("point", POINTS[:4] if FULL else ["archive_copied"])
def test_machines_are_lost_and_hang(alias, new_log, cluster, typed, tmp_path, point):
    archive, name = cluster.project / "archive", "spark_sold"
    projection(name)
    work(alias, 60)
    run(name)
    expected = rebuilt(alias, name)
    committed = 2 if point == "archive_committed" else 1
    publish_some(alias, 1000 + 3000 * committed)

    killed = typed("spark-submit", OUTBOX_FAILPOINT=f"{point}=kill@2")
    assert killed.wait(patience(SECONDS * 2)) != 0
    assert len(entries(archive)) == committed, cluster.output(killed)

    publish_some(alias, 4000)
    timeout = f"--conf spark.network.timeout={patience(8):.0f}s"
    timeout += " --conf spark.network.timeoutInterval=1s"
    timeout += " --conf spark.executor.heartbeatInterval=1s"
    again = typed("python", timeout, OUTBOX_FAILPOINT="archive_planned=stop@2")
    [driver] = eventually(lambda: cluster.stopped(again), "the plan of a batch", SECONDS * 2)
    lock, unlock, waiting = LOCKS[alias]
    with Session(alias) as holder, Session(alias) as other:
        holder.begin().sql(lock)
        os.kill(driver, signal.SIGCONT)
        eventually(lambda: other.sql(waiting) == [(2,)], "a task of each executor")
        cluster.kill(cluster.workers[0])
        hung = cluster.hang(cluster.workers[1])
        cluster.start_worker()
        holder.sql(unlock)
        holder.rollback()
    assert again.wait(patience(SECONDS * 4)) == 0, cluster.output(again)
    total = len(logged(alias))
    done = f"done log=outbox_event archived={total - 3000 * committed} "
    assert done in cluster.output(again)
    assert len(cluster.executors()) >= 5  # two, two, and one for those that were lost
    assert_exact(alias, archive)
    eventually(lambda: not any(map(processes.is_running, hung)), "the end of what hung")

    first = Event.objects.using(alias).earliest("pk").pk
    Event.objects.using(alias).filter(pk__lt=first + 500).delete()  # the archive has them
    damage(alias, name)
    arguments = f"{cluster.url} archive {name} {tmp_path / 'password'}"
    job = cluster.run(f"python -m tests.pipeline.cluster_job {arguments}")
    assert job.wait(patience(SECONDS * 4)) == 0, cluster.output(job)
    said = cluster.output(job)
    assert f"events={total} " in said
    assert "defects=0" in said
    package = f"{cluster.packages}/outbox_app/__init__.py"
    assert f"executors {package} {package}" in said
    figures = parquet.read_table(cluster.project / "figures").to_pylist()
    of_type = [each for each in figures if (each["name"], each["dimension"]) == ("events", "type")]
    assert sum(each["value"] for each in of_type) == total
    assert rows(alias, name) == expected
