"""A drainer reports each problem once when it begins, and once when it is over."""

from __future__ import annotations

import pytest

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Process, StagedJob

from .tools import draining, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)


def lines(caplog, text):
    return [record for record in caplog.records if text in record.message]


@on("postgres")
def test_said_once_and_shown_with_the_drainer(
    alias, redis_url, proxy, make_named_app, book, quick, caplog
):
    link, url = proxy(redis_url)
    link.mode = "refuse"
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 10)
    shown = Process.objects.using(alias).values_list("trouble", flat=True)
    caplog.set_level("INFO", logger="outbox_app")
    with draining(alias):
        eventually(lambda: "cannot be reached" in "".join(shown.all()), "it is in the table")
        eventually(lambda: link.accepted > 4, "it has tried more often than once")
        link.mode = "pass"
        eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
        eventually(lambda: list(shown.all()) == [""], "all is well in the table")
    assert len(lines(caplog, "Unavailable")) == 1
    assert len(lines(caplog, "Available again")) == 1


@on("postgres")
def test_over_without_any_job_of_its_own(
    alias, redis_url, proxy, make_named_app, book, quick, caplog
):
    """The jobs that it could not send were sent by another one."""
    link, url = proxy(redis_url)
    link.mode = "refuse"
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 10)
    drain = Drain(using=alias)
    drain.run_once()
    assert "cannot be reached" in drain.trouble
    StagedJob.objects.using(alias).all().delete()
    link.mode = "pass"
    eventually(lambda: drain.run_once() or app.main not in drain.trouble, "it noticed")
    drain.holder.leave()


@on("postgres")
def test_a_broker_that_is_away_when_it_starts(alias, redis_url, proxy, make_named_app, quick):
    """Seen before there is any job; and no reason to end."""
    link, url = proxy(redis_url)
    link.mode = "refuse"
    app = make_named_app(url)
    drain = Drain(using=alias)
    drain.open_brokers()
    assert app.main in drain.trouble
    link.mode = "pass"
    eventually(lambda: drain.run_once() or app.main not in drain.trouble, "it noticed")
    drain.holder.leave()
