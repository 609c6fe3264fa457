"""The machine on each database: SQLite and MariaDB with kombu's memory, PostgreSQL with Redis too.

``HYPOTHESIS_PROFILE=long`` runs it for long, with other steps each time, and keeps what it finds in
``.hypothesis``. The default, ``short``, takes the same steps each time, so that a change which has
nothing to do with the drain never fails by luck.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .brokers import REFUSED_QUEUE
from .machine import Machine

pytestmark = pytest.mark.django_db(transaction=True)

settings.register_profile(
    "short",
    max_examples=60,
    stateful_step_count=40,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "long", settings.get_profile("short"), max_examples=3000, derandomize=False
)
PROFILE = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def play(stage, share=1.0):
    examples = max(1, int(PROFILE.max_examples * share))
    run_state_machine_as_test(
        lambda: Machine(stage), settings=settings(PROFILE, max_examples=examples)
    )


def test_every_promise_is_kept(alias, make_stage):
    play(make_stage("memory://", "Memory"), share=1.0 if alias == "default" else 0.4)


@pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True)
def test_every_promise_is_kept_with_redis(make_stage, redis_url):
    import redis

    with redis.Redis.from_url(redis_url) as client:

        def reset(refuses):
            client.flushdb()
            if refuses:
                client.set(REFUSED_QUEUE, "not a list")

        play(make_stage(redis_url, "Redis", reset), share=0.4)
