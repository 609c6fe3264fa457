"""Every way in which a job with a receipt ends: how often its body ran, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from celery import chain, chord, group
from django.db import transaction

from outbox_app.models import StagedJob
from tests.patience import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]

ALL = {"prefork", "threads", "gevent", "solo"}


class Case(NamedTuple):
    """One job: how it is called, and by label how often a body runs until nothing is left."""

    call: Callable[[Any], Any]
    ran: dict[str, int]
    pools: set[str] = ALL


def of(name: str, *, label: str = "", **options: Any) -> Callable[[Any], Any]:
    return lambda app: app.tasks[name].apply_async((label or name,), **options)


def expired(app: Any) -> Any:
    past = datetime.now(UTC) - timedelta(hours=1)
    return app.tasks["plain"].apply_async(("expired",), expires=past)


def follow(app: Any, label: str, name: str = "follow") -> Any:
    return app.tasks[name].s(label)


CASES = {
    "a function": Case(of("plain"), {"plain": 1}),
    "bind": Case(of("bound"), {"bound": 1}),
    "a class with __call__": Case(of("of_class"), {"of_class": 1, "called": 1}),
    "base=celery.Task": Case(of("of_celery"), {"of_celery": 1}),
    "an error": Case(of("fails"), {"fails": 1}),
    "retry() twice": Case(of("retries"), {"retries": 3}),
    "autoretry to its end": Case(of("autoretries"), {"autoretries": 3}),
    "Ignore": Case(of("ignored"), {"ignored": 1}),
    "Reject": Case(of("rejected"), {"rejected": 1}),
    "Reject with requeue": Case(of("requeued"), {"requeued": 2}),
    "@idempotent": Case(of("once"), {"once": 1}),
    "replace()": Case(of("replaced"), {"replaced": 1, "replaced-by": 1}),
    "a chain": Case(
        lambda app: chain(app.tasks["plain"].s("c1"), follow(app, "c2"), follow(app, "c3"))(),
        {"c1": 1, "c2": 1, "c3": 1},
    ),
    "a chain whose second task has none": Case(
        lambda app: chain(app.tasks["plain"].s("n1"), follow(app, "n2", "sent"))(),
        {"n1": 1, "n2": 1},
    ),
    "link": Case(
        lambda app: app.tasks["plain"].apply_async(("l1",), link=follow(app, "l2")),
        {"l1": 1, "l2": 1},
    ),
    "a group": Case(
        lambda app: group(app.tasks["plain"].s(f"g{n}") for n in range(3))(),
        {"g0": 1, "g1": 1, "g2": 1},
    ),
    "a chord": Case(
        lambda app: chord(
            [app.tasks["plain"].s("h1"), app.tasks["plain"].s("h2")], follow(app, "body")
        )(),
        {"h1": 1, "h2": 1, "body": 1},
    ),
    "expired": Case(expired, {}),
    "a soft time limit": Case(of("soft"), {"soft": 1}, {"prefork"}),
    "a hard time limit": Case(of("hard"), {"hard": 1}, {"prefork", "gevent"}),
    "a process that dies, acks_late": Case(of("dies_late"), {"dies_late": 2}, {"prefork"}),
}

WORLDS = [
    ("postgres", "redis_url", "prefork"),
    ("postgres", "rabbitmq_url", "prefork"),
    ("mariadb", "rabbitmq_url", "prefork"),
    ("default", "redis_url", "prefork"),
    ("postgres", "redis_url", "threads"),
    ("postgres", "rabbitmq_url", "gevent"),
    ("mariadb", "redis_url", "solo"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("alias", "broker", "pool"), WORLDS, indirect=["alias"])
def test_each_job_is_executed_to_its_end(
    alias, broker, pool, request, receipts, make_jobs_app, start_worker, draining, left, client
):
    app = make_jobs_app(request.getfixturevalue(broker))
    worker = start_worker(app, pool)
    cases = {name: case for name, case in CASES.items() if pool in case.pools}
    for case in cases.values():
        with transaction.atomic(using=alias):
            case.call(app)
    assert StagedJob.objects.using(alias).filter(receipt=3600).exists()

    expected = {label: times for case in cases.values() for label, times in case.ran.items()}

    def ran() -> dict[str, int]:
        return {key.removeprefix("ran:"): int(client.get(key)) for key in client.keys("ran:*")}

    try:
        eventually(lambda: not left() and ran() == expected, seconds=60)
    except AssertionError:
        rows = list(StagedJob.objects.using(alias).values_list("task", "publishes"))
        different = dict(ran().items() ^ expected.items())
        assert (different, left(), rows) == ({}, {}, []), str(worker.log)
