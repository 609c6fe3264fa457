"""Two Celery apps that differ in one thing only: one is plain, the other one stages.

What the plain one sends is the expectation. ``received`` takes the raw messages out of the broker;
``normalised`` replaces what differs from one call to the next: ids (by their order of appearance,
so that relations between them are compared), the broker's tags and the rounding of a TTL.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import redis
from celery import Celery
from celery.app.task import Task
from kombu import Connection, Queue

from outbox_app.celery import OutboxCelery
from tests.intake import tasks

#: What both apps take for now, so that a countdown gives both the same eta.
NOW = datetime.now(UTC)
_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass
class Twin:
    """One of the two apps, with its tasks."""

    app: Celery
    name: str
    add: Task = field(init=False)
    double: Task = field(init=False)
    total: Task = field(init=False)
    bound: Task = field(init=False)

    def __post_init__(self) -> None:
        task = self.app.task
        self.add = task(name="add")(tasks.add)
        self.double = task(name="double")(tasks.double)
        self.total = task(name="total")(tasks.total)
        self.bound = task(name="bound", bind=True, time_limit=7)(tasks.bound)


def twin(cls: type[Celery], broker_url: str, name: str, **conf: Any) -> Twin:
    """Make an app of the given class; ``name`` is its own and its default queue's."""
    app = cls(name, broker=broker_url, set_as_current=False)
    app.conf.update(
        {
            "task_default_queue": name,
            "accept_content": ["json", "pickle", "yaml"],
            "broker_transport_options": {"socket_timeout": 10, "confirm_publish": True},
            **conf,
        }
    )
    app.now = lambda: NOW
    return Twin(app, name)


def plain(broker_url: str, name: str, **conf: Any) -> Twin:
    return twin(Celery, broker_url, name, **conf)


def staging(broker_url: str, name: str, **conf: Any) -> Twin:
    return twin(OutboxCelery, broker_url, name, **conf)


class RedisInbox:
    """The raw messages of a Redis database: those in lists, and those published to channels."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url)
        self.pubsub = self.client.pubsub()

    def prepare(self, queues: Iterable[Queue]) -> None:
        self.pubsub.psubscribe("*")
        self.pubsub.get_message(timeout=5)

    def received(self) -> list[dict[str, Any]]:
        found = []
        for key in sorted(self.client.scan_iter(_type="list")):
            while (raw := self.client.rpop(key)) is not None:
                found.append({"list": key.decode(), **json.loads(raw)})
        while (message := self.pubsub.get_message()) is not None:
            found.append({"channel": message["channel"].decode(), **json.loads(message["data"])})
        for message in found:
            message["body"] = base64.b64decode(message["body"])
            message["properties"].pop("delivery_tag")
        return found

    def close(self) -> None:
        self.pubsub.close()
        self.client.flushdb()
        self.client.close()


class RabbitInbox:
    """The raw messages of some queues of RabbitMQ, which are deleted at the end."""

    def __init__(self, url: str) -> None:
        self.connection = Connection(url)
        self.channel = self.connection.channel()
        self.queues: list[Queue] = []

    def prepare(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            self.queues.append(queue(self.channel))
            self.queues[-1].declare()

    def received(self) -> list[dict[str, Any]]:
        found = []
        for queue in self.queues:
            while (raw := self.channel.basic_get(queue.name, no_ack=True)) is not None:
                raw = getattr(raw, "_raw", raw)
                info = {k: raw.delivery_info[k] for k in ("exchange", "routing_key")}
                body = raw.body.encode() if isinstance(raw.body, str) else raw.body
                properties = dict(raw.properties)
                headers = properties.pop("application_headers", {})
                found.append(
                    {
                        "list": queue.name,
                        "body": body,
                        "headers": headers,
                        "properties": {**properties, "delivery_info": info},
                    }
                )
        return found

    def close(self) -> None:
        for queue in self.queues:
            queue.delete()
        self.connection.release()


def normalised(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids in order of appearance and TTLs in ten seconds."""
    ids: dict[bytes, bytes] = {}

    def number(match: re.Match[bytes]) -> bytes:
        return ids.setdefault(match[0], b"id-%033d" % len(ids))

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: walk(value[key]) for key in sorted(value)}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        if isinstance(value, bytes):
            return _ID.sub(number, value)
        if isinstance(value, str):
            return _ID.sub(number, value.encode("utf-8", "surrogatepass")).decode(
                "utf-8", "surrogatepass"
            )
        return value

    for message in messages:
        properties = message["properties"]
        if "expiration" in properties:
            properties["expiration"] = math.ceil(int(properties["expiration"]) / 10_000)
    return [walk(message) for message in messages]
