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
from struct import pack
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from amqp import spec
from amqp.exceptions import MessageNacked, UnexpectedFrame
from amqp.method_framing import frame_writer
from amqp.serialization import dumps

from ..message import Message
from .outcome import PreparedMessage

#: A slice is sent when it has so many bytes: about a hundred messages of a common size.
SLICE_BYTES = 128 * 1024
#: Headers with longer values are no others' as well.
MAX_KEPT = 100


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
        """Nothing: kombu calls it where a batch is broken off; its connection is dropped."""

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


class Frames:
    """The frames of messages, filled into those that py-amqp made of one that is alike.

    They are byte for byte those of py-amqp, which packs the headers of each message anew, in three
    times the time. What is not like others, or fits no frame, is left to it. The channel is kombu's
    but for its number.
    """

    def __init__(self, channel: Any, channel_id: int, *, optional: Container[str]) -> None:
        self.channel = channel
        self.channel_id = channel_id
        #: Exchanges at which a message need not have a route.
        self.optional = optional
        #: By message that others are alike: see ``_form``.
        self._forms: dict[int, tuple[bytes, ...]] = {}
        #: Headers as AMQP has them, by name and value.
        self._headers: dict[tuple[str, str], bytes] = {}

    def of(self, item: PreparedMessage) -> bytes:
        """Return the frames of a message that is like others; else nothing."""
        if item.alike is None:
            return b""
        if id(item.alike) not in self._forms:
            self._forms[id(item.alike)] = self._form(item.alike)
        method, begin, middle, end = self._forms[id(item.alike)]
        body, id_ = item.row.body, dumps("s", (item.row.task_id,))
        table = b"".join([self._header(*each) for each in item.message.headers.items()])
        size = pack(">HHQ", spec.Basic.CLASS_ID, 0, len(body))
        content = b"".join([size, begin, pack(">I", len(table)), table, middle, id_, end])
        if max(len(content), len(body)) > self.channel.connection.frame_max - 8:
            return b""
        return method + self._frame(2, content) + (self._frame(3, body) if body else b"")

    def arguments(self, exchange: str, routing_key: str) -> bytes:
        """Return those of the method that publishes."""
        mandatory = exchange not in self.optional
        return bytes(dumps("Bssbb", (0, exchange, routing_key, mandatory, False)))

    def _form(self, alike: Message) -> tuple[bytes, ...]:
        """Return the first frame of messages like this one, and the parts of the second."""
        mark = uuid4().hex
        kinds = alike.priority, alike.content_type, alike.content_encoding
        properties = {**alike.properties, "correlation_id": mark}
        message = self.channel.prepare_message(b"", *kinds, {mark: None}, properties)
        arguments = self.arguments(alike.exchange, alike.routing_key)
        frames = bytearray()
        write = frame_writer(self.channel.connection, SimpleNamespace(write=frames.extend))
        write(1, self.channel_id, spec.Basic.Publish, arguments, message)
        head, _, rest = bytes(frames).partition(dumps("F", ({mark: None},)))
        middle, _, end = rest.partition(dumps("s", (mark,)))
        # Around each frame are eight bytes; the second one begins with class, weight and size.
        first = 8 + 4 + len(arguments)
        return head[:first], head[first + 7 + 12 :], middle, end[:-1]

    def _header(self, name: str, value: Any) -> bytes:
        key = name, repr(value)  # not the value: 1, 1.0 and True are equal
        if (packed := self._headers.get(key)) is None:
            packed = dumps("F", ({name: value},))[4:]  # without the size of the table
            if len(key[1]) < MAX_KEPT:
                self._headers[key] = packed
        return packed

    def _frame(self, kind: int, content: bytes) -> bytes:
        return pack(">BHI", kind, self.channel_id, len(content)) + content + b"\xce"
