"""The processes of billing and of the shop that ``test_chaos`` kills, stops and cuts off.

``python -m tests.door.paying pay ALIAS MOST FOLDER`` forks a few that pay, each until there is a
file ``stop`` in the folder. A payment is one transaction of up to ``MOST`` events, and ends in one
of the ways there are; some kill their process, which is forked anew. The file ``begun`` has the
number of events of each transaction that was begun. ``python -m tests.door.paying ask`` is
``run_prepared``. Both wait for an answer for ``DOOR_SECONDS`` at most.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import django
from django.core.management import call_command
from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction

PAYERS = 3
#: Seconds: until the keeper may ask, and of a transaction that hangs.
IMMUNE, HANGS = 0.5, 1.2
TABLE = "CREATE TABLE door_paid (event_id varchar(36) PRIMARY KEY)"


class Declined(Exception):
    """The bank said no."""


def declined(alias: str) -> None:
    raise Declined


def killed(alias: str = "") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_after_commit(alias: str) -> None:
    transaction.on_commit(killed, using=alias)  # the block's own confirm comes after it


def hangs(alias: str) -> None:
    time.sleep(HANGS)


def lost(alias: str, *, arrives: bool) -> None:
    """The connection breaks during COMMIT."""
    connection = connections[alias]
    commit = connection._commit

    def broken() -> None:
        del connection._commit
        if arrives:
            commit()
        connection.connection.close()
        raise OperationalError("the connection was lost during COMMIT")

    connection._commit = broken


#: What happens in a transaction, and to how many of a hundred.
ENDINGS: dict[Callable[[str], Any], int] = {
    lambda alias: None: 62,
    declined: 14,
    killed: 3,
    killed_after_commit: 3,
    hangs: 2,
    partial(lost, arrives=True): 8,
    partial(lost, arrives=False): 8,
}


def pay(alias: str, most: int, folder: Path) -> None:
    begun = os.open(folder / "begun", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not (folder / "stop").exists():
        [ending] = random.choices(list(ENDINGS), list(ENDINGS.values()))
        ids = [UUID(int=random.getrandbits(128), version=4) for _ in range(random.randint(1, most))]
        _pay(alias, ids, ending, begun)
    # Calls that wait are made, as at the end of a process.
    from outbox_app.prepared.sender import calls

    calls.drain(2)


def _pay(alias: str, ids: list[UUID], ending: Callable[[str], Any], begun: int) -> None:
    from outbox_app.prepared import NewPrepared, prepared_many
    from outbox_app.prepared.exceptions import FencedOut, KeeperUnavailable, PreparedConflict

    new = [
        NewPrepared(f"order-{id.int % 40}", "order.paid", {}, event_id=id, immune=IMMUNE)
        for id in ids
    ]
    wait = random.random() < 0.3
    while True:
        try:
            with prepared_many(new, using=alias, to="shop", wait=wait):
                os.write(begun, f"{len(ids)}\n".encode())
                with connections[alias].cursor() as cursor:
                    cursor.executemany(
                        "INSERT INTO door_paid VALUES (%s)", [[str(id)] for id in ids]
                    )
                ending(alias)
        except KeeperUnavailable:
            time.sleep(0.05)
            continue  # with the same ids: they are the same events
        except (DatabaseError, InterfaceError):
            connections[alias].close()
            _wait_for(alias)
        except (Declined, FencedOut, PreparedConflict):
            pass
        return


def _wait_for(alias: str) -> None:
    while True:
        try:
            with connections[alias].cursor() as cursor:
                cursor.execute("SELECT 1")
            return
        except (DatabaseError, InterfaceError):
            connections[alias].close()
            time.sleep(0.05)


def fork(alias: str, most: int, folder: Path) -> int:
    """Have another process pay, until it is killed."""
    if child := os.fork():
        return child
    code = 1
    try:
        random.seed()
        pay(alias, most, folder)
        code = 0
    finally:
        os._exit(code)


def main(kind: str, *arguments: str) -> None:
    django.setup()
    from outbox_app.door import client
    from outbox_app.prepared import remote

    remote.SECONDS = seconds = float(os.environ["DOOR_SECONDS"])
    assert client.call.__kwdefaults__
    client.call.__kwdefaults__["seconds"] = seconds
    if kind == "ask":
        call_command("run_prepared", interval=0.1, processes=4)
        return
    alias, most, folder = arguments[0], int(arguments[1]), Path(arguments[2])
    running = {fork(alias, most, folder) for _ in range(PAYERS)}
    while running:
        pid, status = os.wait()
        running.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            running.add(fork(alias, most, folder))
        elif code:
            sys.exit(f"a payer has ended with {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
