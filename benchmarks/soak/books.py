"""Reads the history of a run: the database, the consumer's file, and what the writers noted."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from outbox_app.history import Record, read

from .consumer import READ, connect
from .world import World


def history(world: World, faults: Mapping[str, int]) -> Iterator[Record]:
    """Yield the records of a run, with the faults that were injected, by name."""
    heard = list(read(sorted(world.folder.glob("*.transactions"))))
    ended = {each["id"]: each for each in heard if each.what == "transaction"}
    happened = (Record("happening", {"name": name, "count": n}) for name, n in faults.items())
    return chain(heard, happened, _arrived(world.arrivals), _found(ended))


def _arrived(file: Path) -> Iterator[Record]:
    """Yield the messages that the broker has accepted, in their order."""
    for task_id, at in _query(file, "SELECT task_id, at FROM arrival ORDER BY number"):
        yield Record("publish", {"job": task_id}, began=at, ended=at)


def _found(ended: Mapping[str, Record]) -> Iterator[Record]:
    """Yield what the database has; ``ended``: the transactions as their writers heard of them."""
    from outbox_app.events.models import Event
    from outbox_app.events.subscriptions.subscriber import all_subscribers
    from outbox_app.models import DeadJob, Incident

    from .models import Committed, Executed, Handled, Staged

    for number in Committed.objects.values_list("number", flat=True):
        yield Record("commit", {"transaction": number})
    # Two rows of one key are in the order of staging: their writers hold the lock of the key.
    for row in Staged.objects.order_by("id").values("id", "task_id", "row", "shard", "key"):
        facts = {"job": row["task_id"], "row": row["row"], "shard": row["shard"]}
        yield Record("stage", {**facts, "key": row["key"], "order": row["id"]})
    for dead in DeadJob.objects.defer("body", "envelope"):
        yield Record("dead", {"job": dead.task_id, "reason": dead.reason})
    for each in Incident.objects.all():
        facts = {"kind": each.kind, "shards": each.shards, "first": each.first_id}
        at = each.created_at.timestamp()
        yield Record("incident", {**facts, "last": each.last_id}, began=at, ended=at)
    for task_id in Executed.objects.order_by("id").values_list("task_id", flat=True):
        yield Record("execute", {"job": task_id})
    for event in Event.objects.values("id", "stream", "version", "data"):
        writer = ended.get(event["data"]["number"])
        names = ("began", "ended", "outcome")
        times: Any = {name: getattr(writer, name) for name in names} if writer else {}
        facts = {"position": event["id"], "stream": event["stream"], "version": event["version"]}
        yield Record("event", facts, **times)
    for each in all_subscribers():
        yield Record("subscription", {"name": each.name, "partitions": each.partitions})
    for name, position in Handled.objects.order_by("id").values_list("subscription", "position"):
        yield Record("handle", {"subscription": name, "position": position})


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
