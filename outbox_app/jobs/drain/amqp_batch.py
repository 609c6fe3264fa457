"""A batch of messages for RabbitMQ: sent at once, and each confirm matched to its message by tag.

py-amqp takes any confirm for that of the last message, so it can only send one at a time. Here a
channel of the batch's own counts from 1: RabbitMQ confirms a message (ack) or refuses it (nack) by
its number, or all up to one, in any order, and returns one without a route before it confirms it.
kombu lets a channel supply a batch of its own, by ``create_publish_batch``. It leaves in slices:
RabbitMQ stores the first messages while the next ones are packed.

The whole batch, its answers included, has one bound in time. Nothing is sent a second time. After
an error the connection must not be used again: answers may come late, to messages that were not
theirs.
"""

from __future__ import annotations

import time
from collections.abc import Container
from functools import partial
from types import SimpleNamespace
from typing import Any

from amqp import spec
from amqp.exceptions import MessageNacked, UnexpectedFrame
from amqp.method_framing import frame_writer

from .amqp_frames import Frames
from .outcome import PreparedMessage

#: A slice is sent when it has so many bytes: about a hundred messages of a common size.
SLICE_BYTES = 128 * 1024


class Unconfirmed(TimeoutError):
    """RabbitMQ has said nothing of this message; it may have taken it."""


class AmqpBatch:
    """What kombu asks of a publish batch, for one flush."""

    def __init__(self, channel: Any, *, seconds: float, optional: Container[str] = ()) -> None:
        """Messages need no route at the ``optional`` exchanges."""
        self.channel = channel
        #: Of each message what became of it, an exception where it was not taken. Two where it went
        #: through an exchange and was refused: another of its queues may have taken it.
        self.answers: list[list[Any]] = []
        #: Something of it may have left.
        self.begun = self.flushed = False
        #: As in ``RedisBatch``; here nothing is asked for that a broker may refuse.
        self.refusal = None
        self._deadline = time.monotonic() + seconds
        self._connection = channel.connection
        self._own = own = self._connection.channel()
        own.confirm_select()
        own.events["basic_ack"].add(partial(self._confirm, None))
        own.events["basic_nack"].add(partial(self._confirm, MessageNacked()))
        own.events["basic_return"].add(self._on_return)
        self._packed = bytearray()
        self._pack = frame_writer(self._connection, SimpleNamespace(write=self._packed.extend))
        self._frames = Frames(channel, own.channel_id, optional=optional)
        #: Of each message what identifies it when it is returned. The first one has the tag 1.
        self._sent: list[tuple[Any, ...]] = []
        self._errors: dict[int, Exception] = {}
        #: Tags without a confirm.
        self._open: set[int] = set()
        #: Up to here all are confirmed; up to here those without a route have been returned.
        self._all_up_to = self._returned_up_to = 0

    def takes(self, item: PreparedMessage) -> bool:
        """Collect a message that is like others, by filling in what differs."""
        if len(self._packed) >= SLICE_BYTES:
            self._write()
        if frames := self._frames.of(item):
            self._packed += frames
            self._note(item.message.exchange, item.message.routing_key, item.row.task_id)
        return bool(frames)

    def publish(self, message: Any, *, exchange: str, routing_key: str, **_: Any) -> None:
        """Collect a message; nothing of one that cannot be encoded."""
        arguments = self._frames.arguments(exchange, routing_key)
        self._pack(1, self._own.channel_id, spec.Basic.Publish, arguments, message)
        self._note(exchange, routing_key, message.properties.get("correlation_id"))

    def _note(self, *identity: Any) -> None:
        self._sent.append(identity)
        self._open.add(len(self._sent))

    def flush(self) -> None:
        """Send the rest, and read the answers. Raises where not every message has one in time."""
        self.flushed = True
        try:
            self._write()
            while self._open:
                self._connection.drain_events(timeout=self._left())
        finally:
            if self.begun:
                self.answers = [self._answer(tag) for tag, _ in enumerate(self._sent, 1)]

    def _write(self) -> None:
        with self._connection.transport.having_timeout(self._left()):
            self.begun = True
            self._connection.transport.write(bytes(self._packed))
        self._packed.clear()

    def discard(self) -> None:
        if not self.begun:
            self._sent, self._open = [], set()

    def close(self) -> None:
        """Close the batch's channel, unless the connection is dropped anyway."""
        own, self._own = self._own, None
        if own is not None and not self._open:
            own.close()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(
                f"RabbitMQ did not confirm {len(self._open)} of {len(self._sent)} messages in the "
                "time of a batch."
            )
        return left

    def _confirm(self, error: Exception | None, tag: int, multiple: bool) -> None:
        for each in range(self._all_up_to + 1, tag + 1) if multiple else [tag]:
            if each in self._open:
                self._open.remove(each)
                if error is not None:
                    self._errors.setdefault(each, error)
        if multiple:
            self._all_up_to = tag

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # They are returned in the order in which they were sent.
        route = exchange, routing_key, message.properties.get("correlation_id")
        for tag in range(self._returned_up_to + 1, len(self._sent) + 1):
            if tag in self._open and self._sent[tag - 1] == route:
                self._errors[tag] = error
                self._returned_up_to = tag
                return
        raise UnexpectedFrame(f"RabbitMQ returned a message that was not sent: {route}")

    def _answer(self, tag: int) -> list[Any]:
        error = self._errors.get(tag)
        if error is None:
            return [Unconfirmed() if tag in self._open else None]
        exchange, *_ = self._sent[tag - 1]
        return [None, error] if exchange and isinstance(error, MessageNacked) else [error]
