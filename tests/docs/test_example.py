"""The example at the beginning of the README runs as described there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def example(
    program: str, *arguments: str, data: Path, **given: str
) -> subprocess.CompletedProcess[str]:
    names = ("DATABASE_URL", "BROKER_URL", "DJANGO_SETTINGS_MODULE", "LEASE_SECONDS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-m", f"example_project.{program}", *arguments],
        cwd=ROOT,
        env={**environment, "DATA_DIR": str(data), **given},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a dozen processes and Spark, on whatever the machine has left
def test_demo_kills_processes_loses_nothing_and_explains_each_duplicate(
    tmp_path: Path,
) -> None:
    arguments = ("--orders", "300", "--writers", "2", "--buyers", "2000", "--pipeline")
    # A terminal that lacks the demo's arrow.
    done = example("demo", *arguments, data=tmp_path, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"drainer-2 .* killed with SIGKILL", done.stdout)
    assert re.search(r"subscriptions-1 .* killed with SIGKILL in the middle of a page", done.stdout)
    assert "View order-progress (pushed): 200 rows right, 0 wrong" in done.stdout
    assert "View article-sales: 4 rows right, 0 wrong" in done.stdout
    assert "Incident recorded: " in done.stdout
    assert re.search(r"^executed +200 +600$", done.stdout, re.MULTILINE)
    assert re.search(r"sale-1 .* killed with SIGKILL between a commit and its answers", done.stdout)
    assert "Sale: 2,000 buyers, 200 pieces; 200 sold, 1,800 told no, 0 left" in done.stdout
    assert re.search(r"^Asked again: [1-9].* 0 of them get another now$", done.stdout, re.MULTILINE)
    assert "Receipts: 200 sent, 0 missing, 0 without a sale" in done.stdout
    assert "audited log=outbox_event events=800 streams=200 defects=0 " in done.stdout
    assert re.search(
        r"DeltaTable\(.*\)\.count\(\).* \\u2192 800 events$", done.stdout, re.MULTILINE
    )
    # The killed drainer had published a batch, which went twice: workers ran no job a second time.
    assert re.search(r"^emptied +[1-9]\d* +messages", done.stdout, re.MULTILINE)
    assert re.search(r"^duplicated +0 +0$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sale_to_a_few_buyers_is_over_before_its_process_is_killed(tmp_path: Path) -> None:
    arguments = ("--orders", "40", "--writers", "1", "--buyers", "3")
    done = example("demo", *arguments, data=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "was over before it could be killed. 3 of 3 buyers have been told" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prepared_demo_publishes_what_was_committed(tmp_path: Path) -> None:
    done = example("prepared_demo", "--payments", "20", data=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\S.*?)  +(\d+) +(\d+) +(\d+) +(\d+)   ", done.stdout, re.MULTILINE)
    rows = {name: tuple(map(int, counted)) for name, *counted in found}
    assert len(rows) == 9
    for name, (paid, committed, published, cancelled) in rows.items():
        assert committed == published == paid - cancelled, name
    never = {"rolls back", "COMMIT lost", "killed before COMMIT", "hangs, then is killed"}
    assert {name for name, counted in rows.items() if not counted[1]} == never
    assert re.search(r"^killed after COMMIT .* 2 answer$", done.stdout, re.MULTILINE)
    assert "Lost: 0, leaked: 0, undecided: 0" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fleet_demo_answers_each_call_and_sells_each_seat_once(tmp_path: Path) -> None:
    done = example("fleet_demo", "--calls", "20", data=tmp_path, DEADLINE=str(patience(2)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\S.*?)  +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$", done.stdout, re.MULTILINE)
    errors = {name: int(counted[-1]) for name, *counted in found}
    assert {name for name, count in errors.items() if count} == {
        "one killed, fail-fast",
        "one stopped, fail-fast",
    }
    assert len(errors) == 10
    assert re.search(r"(server-\d) leads it, .*\n.* \1 is killed", done.stdout)


def test_up_says_what_to_do_where_its_address_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = example("up", "--address", address, data=tmp_path)
    assert done.returncode == 1
    assert f"cannot be served at {address}" in done.stderr
    assert "ARGS=" in done.stderr
    assert not done.stdout
