"""Brokers for the machine: kombu's own transports, with a switch and a book of what they took.

Each send is an operation of the puppet that sends (see ``puppet``). ``Memory`` offers batches as
Redis does, where ``Broker.batches`` asks for it: without a transaction, so that of a batch with one
refused message all others are taken. ``Redis`` is a real server behind the same switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu.exceptions import BatchPublishError
from kombu.transport import memory, redis
from kombu.utils.json import loads

from .puppet import operation, sender

#: The queue of all jobs, and one that the broker refuses while ``Broker.refuses``.
QUEUE, REFUSED_QUEUE = "machine", "machine-refused"


class Broker:
    """The switch and the book. The transports ask ``Broker.current``.

    Args:
        taken: Called with the task id and the sender of each accepted message, in the order of
            acceptance.
        batches: Whether ``Memory`` takes batches.
    """

    current: Broker

    def __init__(self, taken: Callable[[str, str], None], *, batches: bool = False) -> None:
        self.taken = taken
        self.batches = batches
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


class MemoryBatch:
    """As ``kombu.transport.redis.PublishBatch``."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.channel = channel
        self.collected: list[tuple[str, dict[str, Any]]] = []

    def publish(self, message: dict[str, Any], **options: Any) -> Any:
        return self.channel.basic_publish(message, batch=self, **options)

    def flush(self) -> None:
        try:
            Broker.current.send(self._put_all)
        except (ConnectionError, LookupError) as error:
            raise BatchPublishError("the batch failed") from error

    def discard(self) -> None:
        self.collected.clear()

    def close(self) -> None:
        pass

    def _put_all(self) -> None:
        refused = None
        for queue, message in self.collected:
            try:
                Broker.current.put(queue, message)
            except LookupError as error:
                refused = error
        if refused:
            raise refused


class MemoryChannel(memory.Channel):
    @property
    def supports_batch_publish(self) -> bool:
        return Broker.current.batches

    def create_publish_batch(self, max_size: int) -> MemoryBatch:
        return MemoryBatch(self)

    def _put(
        self,
        queue: str,
        message: dict[str, Any],
        batch: MemoryBatch | None = None,
        **kwargs: Any,
    ) -> None:
        if batch is None:
            Broker.current.send(lambda: Broker.current.put(queue, message))
        else:
            batch.collected.append((queue, message))


class Memory(_Switched, memory.Transport):
    Channel = MemoryChannel
    # As with Redis and RabbitMQ; kombu's ConnectionError is not Python's.
    connection_errors = (*memory.Transport.connection_errors, OSError)
    implements = memory.Transport.implements.extend(batch_publish=True)


class RedisBatch(redis.PublishBatch):
    def __init__(self, channel: RedisChannel, max_size: int) -> None:
        super().__init__(channel, max_size)
        execute = self.pipeline.execute

        def switched() -> Any:
            Broker.current.send(lambda: channel.execute_and_note(execute))

        self.pipeline.execute = switched


class RedisChannel(redis.Channel):
    def create_publish_batch(self, max_size: int) -> RedisBatch:
        return RedisBatch(self, max_size)

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
