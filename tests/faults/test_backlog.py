"""The broker is back after a long time: the backlog leaves oldest first, in bounded memory.

``FAULTS_BACKLOG=1000000`` drains a million jobs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from outbox_app.models import StagedJob

from .tools import PATIENT, eventually, on

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

BACKLOG = int(os.environ.get("FAULTS_BACKLOG", 30_000))
#: Seconds for a backlog to leave, at a rate that is low for any machine.
SECONDS = 60 + BACKLOG / 1000


def peak_megabytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


@pytest.mark.timeout(2 * SECONDS)
@on("postgres")
def test_broker_is_back_after_a_long_time(
    alias, private_redis, make_named_app, start_drainer, book
):
    private_redis.stop()
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 2000)
    drainer = start_drainer(alias, app, outbox=PATIENT)
    drainer.says("Unavailable")
    small = peak_megabytes(drainer.pid)
    # All of it waits already when another one starts, and the broker is still away.
    ids = jobs.stage(app, BACKLOG)
    other = start_drainer(alias, app, outbox=PATIENT)
    other.says("Unavailable")
    private_redis.start()

    waiting = StagedJob.objects.using(alias)
    # It begins at once; it reads no backlog first.
    eventually(lambda: 0 < BACKLOG + 2000 - waiting.count() < BACKLOG, "it has begun")
    eventually(lambda: not waiting.exists(), "drained", SECONDS)
    assert peak_megabytes(drainer.pid) < small + 40
    assert peak_megabytes(other.pid) < small + 40
    assert [drainer.stop(), other.stop()] == [0, 0]
    jobs.receive(app)
    jobs.assert_exact()
    order = [jobs.jobs[task_id][0] for task_id in jobs.sent]
    first = jobs.jobs[ids[0]][0] - 2000
    # Oldest first, as far as shards that differ in length allow it.
    assert max(order[: BACKLOG // 10]) < first + BACKLOG * 0.4
    assert min(order[-BACKLOG // 10 :]) > first + BACKLOG * 0.6
