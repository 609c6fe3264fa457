"""A consumer that records everything: ``python -m benchmarks.soak.consumer FILE``.

The consumer reads messages from the broker, notes them in FILE (SQLite), and only then removes
them. Each publish has a unique tag, so that a message that is read twice is noted once. The order
in FILE is the order in which the broker accepted the messages. A second thread executes each
message, duplicates included, until its task has succeeded. The process may be killed at any time.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import django

from .writer import until_terminated

TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE IF NOT EXISTS arrival (
    number INTEGER PRIMARY KEY AUTOINCREMENT, tag TEXT UNIQUE, task_id TEXT, at REAL);
CREATE TABLE IF NOT EXISTS executed (number INTEGER PRIMARY KEY);
"""
READ = ("soak", "soak-fragile")
PAGE = 500
#: One message in so many is also copied to a Celery worker.
WORKED = 5
Message = tuple[str, str]


def connect(file: str) -> sqlite3.Connection:
    """Open the file, without fsync: it need not survive a crash of the machine."""
    database = sqlite3.connect(file, timeout=30, isolation_level=None)
    database.execute("PRAGMA synchronous = OFF")
    return database


def record(database: sqlite3.Connection, messages: list[Message]) -> None:
    """Note the messages whose tags are not noted yet."""
    now = time.time()
    database.execute("BEGIN IMMEDIATE")
    database.executemany(
        "INSERT OR IGNORE INTO arrival (tag, task_id, at) VALUES (?, ?, ?)",
        [(tag, task_id, now) for tag, task_id in messages],
    )
    database.execute("COMMIT")


def read_redis(url: str, note: Callable[[list[Message]], None]) -> Iterator[bool]:
    """Move messages from the lists to ``note``. Yields after each pass whether there were any."""
    from redis import Redis, ResponseError
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    # The client must not retry: a second LTRIM would remove messages that were not noted.
    client = Redis.from_url(url, socket_timeout=10, retry=Retry(NoBackoff(), 0))
    while True:
        busy = False
        for queue in READ:
            try:
                found = client.lrange(queue, -PAGE, -1)[::-1]
            except ResponseError:  # the fault "requeue" has put a string in place of the list
                continue
            if not found:
                continue
            busy = True
            messages = [json.loads(each) for each in found]
            note([(m["properties"]["delivery_tag"], m["headers"]["id"]) for m in messages])
            client.ltrim(queue, 0, -len(found) - 1)
            with suppress(ResponseError):  # out of memory
                client.lpush("soak-work", *found[::WORKED])
        yield busy


def read_rabbitmq(url: str, note: Callable[[list[Message]], None]) -> Iterator[bool]:
    """Move messages from the queues to ``note``. Yields after each pass whether there were any."""
    from amqp import Connection, NotFound
    from amqp import Message as Copy

    host = urlsplit(url).netloc.rpartition("@")[2]
    with Connection(host, connect_timeout=10, read_timeout=10, write_timeout=10) as connection:
        channel = connection.channel()
        while True:
            busy = False
            for queue in READ:
                found: list[Any] = []
                try:
                    while len(found) < PAGE and (message := channel.basic_get(queue)):
                        found.append(message)
                except NotFound:  # not declared yet, or deleted by the fault "requeue"
                    channel = connection.channel()
                    continue
                if not found:
                    continue
                busy = True
                tags = [m.headers.get("tag") or m.properties["message_id"] for m in found]
                note([(tag, m.headers["id"]) for tag, m in zip(tags, found, strict=True)])
                channel.basic_ack(found[-1].delivery_tag, multiple=True)
                for each in found[::WORKED]:
                    copy = Copy(each.body, **each.properties)
                    channel.basic_publish(copy, routing_key="soak-work")
            yield busy


def consume(file: str, url: str, is_ended: Callable[[], bool]) -> None:
    """Record messages until SIGTERM, over all failures of the broker."""
    read = read_redis if url.startswith("redis") else read_rabbitmq
    database = connect(file)
    while not is_ended():
        try:
            for busy in read(url, lambda messages: record(database, messages)):
                if is_ended():
                    return
                if not busy:
                    time.sleep(0.1)
        except Exception as error:  # any failure of the broker
            print(f"broker: {error!r}", file=sys.stderr, flush=True)
            time.sleep(0.2)


def execute(file: str, is_ended: Callable[[], bool]) -> None:
    """Execute each recorded message at least once."""
    from django.db import connection

    from .subscribers import effect

    database = connect(file)
    done = database.execute("SELECT COALESCE(MAX(number), 0) FROM executed").fetchone()[0]
    query = "SELECT number, task_id FROM arrival WHERE number > ? ORDER BY number LIMIT 100"
    while not is_ended():
        found = database.execute(query, [done]).fetchall()
        for number, task_id in found:
            while not effect.apply(task_id=task_id).successful() and not is_ended():
                connection.close()
                time.sleep(0.2)
            if is_ended():
                return
            done = number
        if found:
            database.execute("INSERT OR IGNORE INTO executed VALUES (?)", [done])
        else:
            time.sleep(0.1)


def main(file: str) -> None:
    """Record and execute until SIGTERM."""
    django.setup()
    with until_terminated() as is_ended:
        thread = threading.Thread(target=execute, args=[file, is_ended], daemon=True)
        thread.start()
        consume(file, os.environ["SOAK_BROKER"], is_ended)
        thread.join(10)


if __name__ == "__main__":
    main(sys.argv[1])
