"""Reads the books of a run: from the database, the consumer's file, and the writers' logs."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from .consumer import READ, connect
from .judge import Arrival, Books, Recorded, Row
from .world import World


def read(world: World) -> Books:
    """Return the books for the judge."""
    from outbox_app.events.models import Event
    from outbox_app.models import DeadJob, Incident

    from .models import Committed, Executed, Handled, Staged

    arrivals = _query(world.arrivals, "SELECT task_id, at FROM arrival ORDER BY number")
    handled: dict[str, list[int]] = {name: [] for name in subscriptions()}
    for name, position in Handled.objects.order_by("id").values_list("subscription", "position"):
        handled[name].append(position)
    heard = transactions(world)
    rows = Staged.objects.order_by("id").values_list("id", "task_id", "row", "shard", "key")
    return Books(
        rows=[Row(*row) for row in rows],
        arrivals=[Arrival(*arrival) for arrival in arrivals],
        incidents=[
            Recorded(i.kind, frozenset(i.shards), i.first_id, i.last_id, i.created_at.timestamp())
            for i in Incident.objects.all()
        ],
        dead={dead.task_id: dead.reason for dead in DeadJob.objects.defer("body", "envelope")},
        executed=list(Executed.objects.values_list("task_id", flat=True)),
        events={
            id: (stream, version)
            for id, stream, version in Event.objects.values_list("id", "stream", "version")
        },
        handled=handled,
        committed=list(Committed.objects.values_list("number", flat=True)),
        heard_committed=heard["committed"],
        heard_rolled_back=heard["rolled"],
        sends_of_an_attempt=2 if world.broker_name == "redis" else 1,
    )


def transactions(world: World) -> dict[str, list[str]]:
    """Return the numbers of the transactions in the writers' logs, by the outcome in the log."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in world.folder.glob("*.transactions"):
        for line in file.read_text().splitlines():
            what, number, *_ = line.split()
            found[what].append(number)
    return found


def subscriptions() -> list[str]:
    """Return the names of the subscriptions."""
    from outbox_app.events.subscriptions.subscriber import all_subscribers

    return [each.name for each in all_subscribers()]


def arrived(file: Path) -> Counter[str]:
    """Return how many jobs were accepted, how many publishes were extra, and how many wait."""
    publishes, jobs, last = _query(
        file, "SELECT COUNT(*), COUNT(DISTINCT task_id), COALESCE(MAX(number), 0) FROM arrival"
    )[0]
    done = _query(file, "SELECT COALESCE(MAX(number), 0) FROM executed")[0][0]
    return Counter(accepted=jobs, twice=publishes - jobs, unexecuted=last - done)


def unread(world: World) -> int:
    """Return how many messages in the broker the consumer has not read."""
    if world.broker_name == "redis":
        from redis import Redis

        with Redis.from_url(world.broker.url, socket_timeout=10) as client:
            return sum(client.llen(name) for name in READ if client.type(name) == b"list")
    from amqp import Connection

    with Connection(f"127.0.0.1:{world.broker.port}", read_timeout=10) as connection:
        channel = connection.channel()
        return sum(channel.queue_declare(queue, passive=True).message_count for queue in READ)


def _query(file: Path, query: str) -> list[Any]:
    database = connect(str(file))
    try:
        return database.execute(query).fetchall()
    except sqlite3.OperationalError:
        return []
    finally:
        database.close()
