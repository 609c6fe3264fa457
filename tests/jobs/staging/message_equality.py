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
from datetime import datetime
from functools import partial
from typing import Any

import redis
from celery import Celery
from celery.app.task import Task
from kombu import Connection, Queue, pools

from tests.jobs.staging import tasks

_ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass
class Twin:
    """One of the two apps, with its tasks."""

    app: Celery
    #: What the app takes for now, so that a countdown gives both twins the same eta.
    now: datetime
    add: Task = field(init=False)
    double: Task = field(init=False)
    total: Task = field(init=False)
    bound: Task = field(init=False)

    def __post_init__(self) -> None:
        task = partial(self.app.task, shared=False)  # not with every other app of the process
        self.add = task(name="add")(tasks.add)
        self.double = task(name="double")(tasks.double)
        self.total = task(name="total")(tasks.total)
        self.bound = task(name="bound", bind=True, time_limit=7)(tasks.bound)

    def close(self) -> None:
        """End the app and its connections."""
        pools.reset()
        backend = self.app._backend
        if hasattr(getattr(backend, "result_consumer", None), "subscribed_to"):
            backend.result_consumer.subscribed_to.clear()  # or results unsubscribe when collected
            backend.result_consumer.stop()
            backend.client.connection_pool.disconnect()
        self.app.close()


def twin(cls: type[Celery], broker_url: str, name: str, *, now: datetime, **conf: Any) -> Twin:
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
    app.now = lambda: now
    return Twin(app, now)


class Inbox:
    """Looks into a broker: takes raw messages out, and leaves nothing behind.

    Args:
        url: A broker whose queues, exchanges and database belong to the test.
    """

    def __init__(self, url: str) -> None:
        self.connection = Connection(url)
        self.channel = self.connection.channel()
        self.queues: list[Queue] = []

    def declare(self, queues: Iterable[Queue]) -> None:
        """Declare queues, so that what is routed to them can be received."""
        for queue in queues:
            self.queues.append(queue(self.channel))
            self.queues[-1].declare()

    def received(self) -> list[dict[str, Any]]:
        """Take every message, in order."""
        raise NotImplementedError

    def close(self) -> None:
        for queue in self.queues:
            queue.delete()
            # An exchange that is named like the queue, or in Celery's way, may be anybody's.
            if queue.exchange is not None and queue.exchange.name.startswith("outbox-"):
                queue.exchange.delete()
        self.connection.release()


class RedisInbox(Inbox):
    """Takes from the lists of a Redis database, and what was published to its channels."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.client = redis.Redis.from_url(url)
        self.pubsub = self.client.pubsub()
        # Channels are common to all databases; kombu puts the number into their names.
        self.pubsub.psubscribe(f"/{self.connection.virtual_host}.*")
        self.pubsub.get_message(timeout=5)

    def received(self) -> list[dict[str, Any]]:
        found = []
        for key in sorted(self.client.scan_iter(_type="list")):
            while (raw := self.client.rpop(key)) is not None:
                found.append({"queue": key.decode(), **json.loads(raw)})
        while (message := self.pubsub.get_message()) is not None:
            found.append({"queue": message["channel"].decode(), **json.loads(message["data"])})
        for message in found:
            message["body"] = base64.b64decode(message["body"])
            message["properties"].pop("delivery_tag")
        return found

    def close(self) -> None:
        super().close()
        self.pubsub.close()
        self.client.close()


class RabbitInbox(Inbox):
    """Takes from the declared queues."""

    def received(self) -> list[dict[str, Any]]:
        found = []
        for queue in self.queues:
            while (raw := self.channel.basic_get(queue.name, no_ack=True)) is not None:
                properties, body = dict(raw.properties), raw.body
                if isinstance(body, str):
                    body = body.encode(properties.get("content_encoding", "utf-8"))
                headers = properties.pop("application_headers", {})
                headers.pop("x-delivery-count", None)  # added by quorum queues
                route = {name: raw.delivery_info[name] for name in ("exchange", "routing_key")}
                found.append(
                    {
                        "queue": queue.name,
                        "body": body,
                        "headers": headers,
                        "properties": {**properties, "delivery_info": route},
                    }
                )
        return found


def normalised(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with ids in order of appearance and TTLs in minutes."""
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
            properties["expiration"] = math.ceil(int(properties["expiration"]) / 60_000)
    return [walk(message) for message in messages]
