"""Brokers for the machine: kombu's own transports, with a switch and a book of what they took.

Each send is an operation of the drainer that sends: see ``fault_injector``. ``Redis`` is a real
server behind the same switch, to which the drain sends batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.transport import memory, redis
from kombu.utils.json import loads

from outbox_app.jobs.drain.redis_batch import RedisBatch

from .fault_injector import operation, sender

#: The queue of all jobs, and one that the broker refuses while ``Broker.refuses``.
QUEUE, REFUSED_QUEUE = "machine", "machine-refused"


class Broker:
    """The switch and the book. The transports ask ``Broker.current``.

    Args:
        taken: Called with the task id and the sender of each accepted message, in the order of
            acceptance.
    """

    current: Broker

    def __init__(self, taken: Callable[[str, str], None]) -> None:
        self.taken = taken
        self.up = True
        self.refuses = True

    def reach(self) -> None:
        """Raise ConnectionError while the broker is down."""
        if not self.up:
            raise ConnectionError("the broker is down")

    def send(self, do: Callable[[], Any]) -> Any:
        """Send something."""

        def reached() -> Any:
            self.reach()
            return do()

        return operation("send", reached, ConnectionError)

    def put(self, queue: str, message: dict[str, Any]) -> None:
        """Accept a message, or refuse it by its queue."""
        if queue == REFUSED_QUEUE and self.refuses:
            raise LookupError(f"no route to queue {queue!r}")
        self.take(message)

    def take(self, message: dict[str, Any]) -> None:
        """Note an accepted message."""
        self.taken(message["headers"]["id"], sender())


class _Switched:
    """Mixin of transports."""

    def establish_connection(self) -> Any:
        Broker.current.reach()
        return super().establish_connection()  # type: ignore[misc]

    def create_channel(self, connection: Any) -> Any:
        Broker.current.reach()
        return super().create_channel(connection)  # type: ignore[misc]


class MemoryChannel(memory.Channel):
    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        Broker.current.send(lambda: Broker.current.put(queue, message))


class Memory(_Switched, memory.Transport):
    Channel = MemoryChannel
    # As with Redis and RabbitMQ; kombu's ConnectionError is not Python's.
    connection_errors = (*memory.Transport.connection_errors, OSError)


class SwitchedBatch(RedisBatch):
    """The drain's own batch, behind the switch. Where its outcome is lost, so are its answers."""

    def flush(self) -> None:
        flush = super().flush
        try:
            Broker.current.send(lambda: self.channel.execute_and_note(flush))
        except BaseException:
            self.answers = []
            raise


class RedisChannel(redis.Channel):
    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        if "_publish_batch" in kwargs:
            super()._put(queue, message, **kwargs)
        else:
            put = super()._put
            send = self.execute_and_note
            Broker.current.send(lambda: send(lambda: put(queue, message, **kwargs)))

    def execute_and_note(self, execute: Callable[[], Any]) -> Any:
        """Send to the server, and note what its lists hold, oldest first, as ``LPUSH`` left it."""
        try:
            return execute()
        finally:
            for key in (QUEUE, REFUSED_QUEUE):
                if self.client.type(key) == b"list":
                    for text in reversed(self.client.lrange(key, 0, -1)):
                        Broker.current.take(loads(text))
                    self.client.delete(key)


class Redis(_Switched, redis.Transport):
    Channel = RedisChannel
