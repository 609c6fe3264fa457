"""The machine on each database: SQLite and MariaDB with kombu's memory, PostgreSQL with Redis too.

The default profile, ``short``, takes the same steps in each run, so that a change elsewhere does
not fail by chance. ``HYPOTHESIS_PROFILE=long`` takes many other steps in each run (for an hour or
so), and keeps its failures in ``.hypothesis``. A failure ends with the steps that lead to it; they
are methods of ``Machine``, so they can be copied into ``test_found``.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.servers.mysql import MARIADB

from .brokers import REFUSED_QUEUE
from .machine import Machine

settings.register_profile(
    "short",
    max_examples=50,
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
#: What a database does of the profile's examples.
SHARES = {"default": 1, "postgres": 0.4, MARIADB: 0.2}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True),
    # Time to find the shortest way to a failure, too.
    pytest.mark.timeout(600 + 2 * PROFILE.max_examples),
]


def play(stage, *, share):
    some = settings(PROFILE, max_examples=int(PROFILE.max_examples * share))
    run_state_machine_as_test(lambda: Machine(stage), settings=some)


def test_every_promise_is_kept(alias, make_stage):
    play(make_stage("memory://", "Memory"), share=SHARES[alias])


@pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True)
def test_every_promise_is_kept_with_redis(make_stage, redis_url):
    import redis

    with redis.Redis.from_url(redis_url) as client:

        def reset(refuses):
            client.flushdb()
            if refuses:
                client.set(REFUSED_QUEUE, "not a list")

        play(make_stage(redis_url, "Redis", reset), share=0.3)
