"""A history of four processes that append to lists, are killed, stopped, and lose connections.

Every answered command is in the history, at the version of its answer; versions have no gaps; a
list holds the items of its accepted versions, in their order; and another process gives each
command the same answer again. ``ENTITIES_HISTORY=200000`` sets the number of items (default: 400).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from django.db import DatabaseError, connections

from outbox_app.entities import Command
from tests import forking
from tests.entities.appending import PROCESSES, commands, lists
from tests.entities.models import Account

COUNT = int(os.environ.get("ENTITIES_HISTORY", 400))

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(300 + COUNT // 10),
]


def cut(alias):
    """Cut the connections of all other processes."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        elif connection.vendor == "mysql":
            cursor.execute(
                "SELECT id FROM information_schema.processlist "
                "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
            for (id,) in cursor.fetchall():
                with suppress(DatabaseError):  # it has ended
                    cursor.execute(f"KILL {id}")


def check(alias, told):
    """Compare what callers were told with what is there."""
    there = {}
    for id in {id for id, *_ in told}:
        rows = list(Account.history(id, using=alias))
        assert [row.version for row in rows] == list(range(1, len(rows) + 1))
        items = []
        for row in rows[1:]:
            if not row.rejected:
                items.append(row.data["item"])
                assert row.response == len(items)
            assert row.state.get("items", []) == items
            code = row.response["code"] if row.rejected else None
            assert row.command_id not in there
            there[row.command_id] = id, row.version, None if code else row.response, code
        entity = Account.objects.using(alias).get(pk=id)
        assert (entity.version, entity.state.get("items", [])) == (len(rows), items)
    for id, command_id, *answer in told:
        assert there[command_id] == (id, *answer)
    return there


def test_a_thousand_callers_on_one_entity(alias, environment, tmp_path):
    Account.execute("list-0", "open", {"owner": "x"}, command_id="open", using=alias)
    log = tmp_path / "answers"
    forking.run(
        [sys.executable, "-m", "tests.entities.appending", alias, "1000", str(log), "hot"],
        env=environment(alias),
        check=True,
    )
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(told) == len(check(alias, told)) == 1000


def test_what_callers_were_told_is_there(alias, environment, tmp_path):
    Account.execute_many(
        [
            Command(f"list-{number}", "open", {"owner": "x"}, command_id="open")
            for number in range(lists(COUNT))
        ],
        using=alias,
    )
    log = tmp_path / "answers"
    done = forking.Popen(
        [sys.executable, "-m", "tests.entities.appending", alias, str(COUNT), str(log)],
        env=environment(alias),
        start_new_session=True,
    )
    try:
        while done.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                done.wait(0.5)
            if log.exists():
                cut(alias)
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(done.pid, signal.SIGKILL)
    assert done.returncode == 0
    told = [json.loads(line) for line in log.read_text().splitlines()]
    there = check(alias, told)
    assert len(there) == COUNT
    assert Path(f"{log}.stopped").exists()
    asked = [each for process in range(PROCESSES) for each in commands(process, COUNT)]
    again = Account.execute_many(
        [Command(id, "enlist", {"item": item}, command_id=name) for id, name, item in asked],
        using=alias,
    )
    for (id, name, _), outcome in zip(asked, again, strict=True):
        code = outcome.rejected.code if outcome.rejected else None
        assert outcome.replayed
        assert there[name] == (id, outcome.version, outcome.response, code)
