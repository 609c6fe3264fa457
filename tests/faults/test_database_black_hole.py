"""The network to the database drops everything, or refuses: only the drainer's own timeouts help.

Real drainers reach the database through a proxy. The limit for an answer is the lease.
"""

from __future__ import annotations

import json
import signal

import pytest

from outbox_app.models import Incident, Process, StagedJob

from .tools import assert_handed_back, drain, eventually, is_quiet, listeners, on

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("failpoint", ["idle", "claimed", "published_not_deleted"])
@on("postgres", "mariadb")
def test_black_hole(
    alias, failpoint, redis_url, proxy, environment, make_named_app, start_drainer, book, quick
):
    """Nothing is refused, nothing is answered: only the drainer's own bounds help."""
    variable = f"{alias.upper()}_URL"
    link, url = proxy(environment(alias)[variable])
    app, jobs = make_named_app(redis_url), book(alias)
    where = {} if failpoint == "idle" else {"OUTBOX_FAILPOINT": f"{failpoint}=stop"}
    drainer = start_drainer(alias, app, **{variable: url}, **where)
    eventually(Process.objects.using(alias).exists, "it runs")
    if where:
        jobs.stage(app, 100)
        eventually(lambda: is_stopped(drainer.pid), "in the middle of a batch")
    link.mode = "blackhole"
    if where:
        drainer.signal(signal.SIGCONT)
    drainer.says("Unavailable what=")
    link.mode = "pass"
    link.cut()
    jobs.stage(app, 100)

    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
    assert drainer.stop() == 0
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(alias)


@pytest.mark.parametrize("how", ["refuse", "blackhole"])
@on("postgres", "mariadb")
def test_sigterm_while_it_is_away(
    alias, how, redis_url, proxy, environment, make_named_app, start_drainer, book, quick
):
    """It ends in time; what it could not hand back is taken over."""
    variable = f"{alias.upper()}_URL"
    link, url = proxy(environment(alias)[variable])
    app, jobs = make_named_app(redis_url), book(alias)
    drainer = start_drainer(
        alias, app, **{variable: url, "OUTBOX_FAILPOINT": "published_not_deleted=stop"}
    )
    jobs.stage(app, 100)
    eventually(lambda: is_stopped(drainer.pid), "published, not deleted")
    link.mode = how
    if how == "refuse":
        link.cut()
    drainer.signal(signal.SIGCONT)
    drainer.says("Unavailable what=")
    assert drainer.stop() == 0
    assert StagedJob.objects.using(alias).exists()

    drain(alias)
    jobs.receive(app)
    jobs.assert_complete()
    assert jobs.twice
    assert Incident.objects.using(alias).get().kind == Incident.Kind.TAKEOVER


@pytest.mark.parametrize("command", ["drain_outbox", "run_subscriptions"])
@on("postgres")
def test_sigterm_before_it_is_noticed(
    alias, command, redis_url, proxy, environment, make_named_app, start_drainer
):
    """The first statement without an answer is the one that hands the leases back."""
    link, url = proxy(environment(alias)["POSTGRES_URL"])
    options = {"LEASE_SECONDS": 5, "INTERVAL": 60, "SUBSCRIPTION_INTERVAL": 60}
    variables = {"POSTGRES_URL": url, "OUTBOX_TEST_SUBSCRIBER": json.dumps({"name": "noted"})}
    process = start_drainer(
        alias, make_named_app(redis_url), command=command, outbox=options, **variables
    )
    eventually(lambda: listeners(alias) and is_quiet(alias), "it has nothing to do")
    link.mode = "blackhole"
    assert process.stop() == 0
    assert Process.objects.using(alias).exists()


@on("postgres")
def test_away_when_it_starts(
    alias, redis_url, proxy, environment, make_named_app, start_drainer, book
):
    link, url = proxy(environment(alias)["POSTGRES_URL"])
    link.mode = "refuse"
    app, jobs = make_named_app(redis_url), book(alias)
    drainer = start_drainer(alias, app, POSTGRES_URL=url)
    drainer.says("Unavailable what=")
    link.mode = "pass"
    jobs.stage(app, 10)
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
    assert drainer.stop() == 0


@on("postgres")
def test_sigterm_before_the_first_answer(
    alias, redis_url, proxy, environment, make_named_app, start_drainer
):
    link, url = proxy(environment(alias)["POSTGRES_URL"])
    link.mode = "blackhole"
    drainer = start_drainer(alias, make_named_app(redis_url), POSTGRES_URL=url)
    eventually(lambda: link.accepted, "it connects")
    assert drainer.stop() == 0


def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"
