"""Only the servers start that the chosen tests need, and a test that misses one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.servers.needed import CHOSEN, needed

SERVERS = ("postgres", "mariadb", "redis", "rabbitmq")
FILE, BY_NAME = "tests/isolation/needy.py", "tests/isolation/needy_by_name.py"
PYTEST = (sys.executable, "-m", "pytest")
OWN = ("_URL", "PYTEST_XDIST", "OUTBOX_TEST", "CI")


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not any(own in key for own in OWN)}
    return subprocess.run(
        command, env={**kept, **variables}, capture_output=True, text=True, check=False
    )


@pytest.fixture(autouse=True)
def in_the_checkout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(
    ("arguments", "servers"),
    [
        ([f"{FILE}::test_alone"], set()),
        ([f"{FILE}::test_on_each"], {"postgres", "mariadb"}),
        ([FILE, "-k", "on_each and not mariadb"], {"postgres"}),
        ([f"{FILE}::test_on_two"], {"mariadb"}),
        ([f"{FILE}::test_with_a_broker"], {"rabbitmq"}),
        ([BY_NAME, "-n", "auto"], {"redis"}),
        ([FILE, BY_NAME], set(SERVERS)),
        ([FILE, "-k", "nothing"], set()),
        ([], None),
        (["-k", "on_each"], None),
        ([FILE, "--no-such-option"], None),
    ],
)
def test_servers_that_tests_need(arguments: Sequence[str], servers: set[str] | None) -> None:
    assert needed([*PYTEST, *arguments], SERVERS) == servers


def test_no_other_server_starts() -> None:
    servers = (sys.executable, "-m", "tests.servers", "--needed", "--workers", "3", "run", "--")
    ended = run(*servers, *PYTEST, f"{FILE}::test_alone", "-n", "auto")
    assert "the tests need no server\n" in ended.stderr
    assert "ready after" not in ended.stderr
    assert "3 workers" in ended.stdout
    assert "1 passed" in ended.stdout.splitlines()[-1], ended.stdout


def test_a_need_that_was_not_found_fails_the_test() -> None:
    ended = run(*PYTEST, FILE, BY_NAME, "-k", "postgres or asks", **{CHOSEN: "rabbitmq"})
    for variable in ("POSTGRES_URL", "REDIS_URL"):
        assert f"{variable} is not set: tests.needs has found that the tests need rabbitmq" in (
            ended.stdout
        )
    assert "1 failed, 6 deselected, 1 error in" in ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("tier", "tests"),
    [
        ("unit", ["test_alone", "test_on_each[sqlite]", "test_with_a_broker[memory]"]),
        ("database", ["test_on_each[mariadb]", "test_on_each[postgres]", "test_on_two"]),
        ("system", ["test_with_a_broker[rabbitmq]"]),
        ("not pages", []),
    ],
)
def test_tiers_follow_from_what_tests_need(tier: str, tests: Sequence[str]) -> None:
    ended = run(*PYTEST, FILE, "-m", tier, "--collect-only", "-q")
    found = [line.partition("::")[2] for line in ended.stdout.splitlines() if "::" in line]
    assert sorted(found) == tests
