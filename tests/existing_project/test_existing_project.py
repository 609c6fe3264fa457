"""A project written for Celery gives the same results, unchanged and with one changed import.

``library`` does not know outbox_app. It has canvas, routes, retries, beat, results, two databases,
ATOMIC_REQUESTS, a custom user model, django-celery-results and -beat, and Sentry. A copy runs with
Celery; then the test changes the import and INSTALLED_APPS, and runs it again. The project makes no
call inside a transaction of only another database: after the change such a call is refused, as
docs/howto/migrate.md says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.patience import patience

ROOT = Path(__file__).parents[2]
LIBRARY = Path(__file__).parent / "library"
WORKER = (
    "worker --pool threads --concurrency 4 --queues celery,mail,reports --beat --without-mingle"
)


def switch(project: Path) -> None:
    """What ``docs/howto/migrate.md`` asks for."""
    celery, settings = project / "library/celery.py", project / "library/settings.py"
    imported = "from outbox_app.celery import OutboxCelery as Celery"
    celery.write_text(celery.read_text().replace("from celery import Celery", imported))
    apps = 'INSTALLED_APPS = [\n    "outbox_app",'
    settings.write_text(settings.read_text().replace("INSTALLED_APPS = [", apps))


@contextmanager
def database(name: str) -> Iterator[str]:
    url = os.environ["POSTGRES_URL"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        try:
            yield urlsplit(url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def running(*command: str, log: Path, **options: Any) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen([*command], stdout=file, stderr=file, **options)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(patience(30))
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path, redis_url: str, environment: Callable[[str], dict[str, str]]) -> Any:
    """Run the scenario in a copy of the project; return its results, and Sentry's events."""

    def run(name: str, *, staged: bool) -> tuple[dict[str, Any], list[Any]]:
        project = tmp_path / name
        shutil.copytree(LIBRARY, project)
        if staged:
            switch(project)
        with ExitStack() as stack:
            url = stack.enter_context(database(f"library_{name}_{os.getpid()}"))
            kept = {"PATH", "HOME", "LANG", "PYTHONDONTWRITEBYTECODE"}
            variables = {key: value for key, value in os.environ.items() if key in kept}
            variables |= {"DATABASE_URL": url, "BROKER_URL": redis_url, "DATA_DIR": str(project)}
            variables |= {"KEY_PREFIX": f"{name}-{os.getpid()}-", "PYTHONPATH": str(ROOT)}
            given: dict[str, Any] = {"cwd": project, "env": variables}

            def manage(*arguments: str) -> None:
                done = subprocess.run(
                    [sys.executable, "manage.py", *arguments],
                    **given,
                    capture_output=True,
                    text=True,
                )
                logs = "\n".join(log.read_text()[-5000:] for log in project.glob("*.log"))
                assert done.returncode == 0, done.stdout + done.stderr + logs

            manage("prepare")
            celery = [sys.executable, "-m", "celery", "-A", "library", *WORKER.split()]
            stack.enter_context(running(*celery, log=project / "worker.log", **given))
            if staged:
                drain = [sys.executable, "manage.py", "drain_outbox"]
                stack.enter_context(running(*drain, log=project / "drain.log", **given))
            manage("scenario", str(project / "found.json"), "--rolled-back", str(int(not staged)))
        sentry = [json.loads(line) for line in (project / "sentry.jsonl").read_text().splitlines()]
        return json.loads((project / "found.json").read_text()), sentry

    return run


@pytest.mark.timeout(600)  # a worker and a drainer, twice
def test_one_line_changes_what_a_rollback_does_and_nothing_else(run: Any) -> None:
    plain, plain_errors = run("plain", staged=False)
    staged, staged_errors = run("staged", staged=True)
    assert (plain.pop("ran for a rollback"), staged.pop("ran for a rollback")) == (1, 0)
    assert staged == plain
    assert (plain["reminded"], plain["loans"], plain["refused"]) == (3, 3, 500)
    assert plain["broken"] == "ZeroDivisionError: no books"
    assert plain["retried"] == [250, 2]
    assert plain["keywords"]["traced by Sentry"] is True
    assert ["loans.tasks.broken", "ZeroDivisionError"] in plain_errors
    # What ran for a rollback is one more error, if its retries have come to their end.
    more = [error for error in plain_errors if error not in staged_errors]
    assert more in ([], [["loans.tasks.remind", "Loan.DoesNotExist"]])
    assert sorted(staged_errors) == sorted(error for error in plain_errors if error not in more)
