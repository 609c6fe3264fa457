"""A batch of messages for RabbitMQ: sent at once, and each confirm matched to its message by tag.

py-amqp takes any confirm for that of the last message. A batch has a channel of its own, which
numbers messages from 1. RabbitMQ confirms (ack) or refuses (nack) the message with a number, or all
up to that number, in any order; it returns a message without a route before it confirms it.

One time limit covers the whole batch and its answers. Nothing is sent a second time. After an error
the connection must not be used again: late answers would be matched to the wrong messages.
"""

from __future__ import annotations

import time
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

#: The size at which a slice of the batch is sent, about a hundred messages of a common size:
#: RabbitMQ stores them while the next ones are packed.
SLICE_BYTES = 128 * 1024
#: Packed headers are cached if the value is shorter: a longer one seldom occurs twice.
MAX_KEPT = 100


class Unconfirmed(TimeoutError):
    """RabbitMQ has not answered for this message, and may have taken it."""


class AmqpBatch:
    """A batch as a channel's ``create_publish_batch`` supplies it to kombu, for one flush."""

    def __init__(self, channel: Any, *, seconds: float) -> None:
        self.channel = channel
        #: The answers for each message; an exception means that it was not taken. A message that
        #: an exchange routed and a queue refused has two: another queue may have taken it.
        self.answers: list[list[Any]] = []
        #: ``begun``: a part of the batch may have left.
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
        self._frames = Frames(channel, own.channel_id)
        #: What identifies each message when it is returned. The first message has the tag 1.
        self._sent: list[tuple[Any, ...]] = []
        self._errors: dict[int, Exception] = {}
        #: Tags that are not confirmed yet.
        self._open: set[int] = set()
        #: The tag up to which all are confirmed, and the tag that was returned last.
        self._all_up_to = self._returned_up_to = 0

    def takes(self, item: PreparedMessage) -> bool:
        """Collect a message that resembles others by filling in what differs; else return False."""
        if len(self._packed) >= SLICE_BYTES:
            self._write()
        if frames := self._frames.of(item):
            self._packed += frames
            self._note(item.message.exchange, item.message.routing_key, item.row.task_id)
        return bool(frames)

    def publish(
        self, message: Any, *, exchange: str, routing_key: str, mandatory: bool = True, **_: Any
    ) -> None:
        """Collect a message. One that cannot be encoded adds nothing."""
        arguments = _arguments(exchange, routing_key, mandatory)
        self._pack(1, self._own.channel_id, spec.Basic.Publish, arguments, message)
        self._note(exchange, routing_key, message.properties.get("correlation_id"))

    def _note(self, *identity: Any) -> None:
        self._sent.append(identity)
        self._open.add(len(self._sent))

    def flush(self) -> None:
        """Send the rest, and read the answers. Raises if a message has no answer in time."""
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
        """Do nothing: kombu calls this for an aborted batch, whose connection is dropped."""

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
        # RabbitMQ returns messages in the order in which they were sent.
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
    """The frames of messages, made from what py-amqp packed for a similar message.

    The result is py-amqp's, byte for byte; py-amqp packs the headers of each message anew, in three
    times the time. It still packs a message that resembles no other, or is larger than a frame.
    ``channel`` is kombu's; the frames go to the channel with the number ``channel_id``.
    """

    def __init__(self, channel: Any, channel_id: int) -> None:
        self.channel = channel
        self.channel_id = channel_id
        #: The parts that similar messages share, by the id() of their ``alike`` and whether they
        #: are mandatory: see ``_form``.
        self._forms: dict[tuple[int, bool], tuple[bytes, ...]] = {}
        #: Headers in AMQP's encoding, by name and value.
        self._headers: dict[tuple[str, str], bytes] = {}

    def of(self, item: PreparedMessage) -> bytes:
        """Return the frames of a message that resembles others; b"" for any other."""
        if item.alike is None:
            return b""
        key = id(item.alike), item.mandatory
        if key not in self._forms:
            self._forms[key] = self._form(item.alike, mandatory=item.mandatory)
        method, begin, middle, end = self._forms[key]
        body, id_ = item.row.body, dumps("s", (item.row.task_id,))
        table = b"".join([self._header(*each) for each in item.message.headers.items()])
        size = pack(">HHQ", spec.Basic.CLASS_ID, 0, len(body))
        content = b"".join([size, begin, pack(">I", len(table)), table, middle, id_, end])
        # A frame is eight bytes longer than its content.
        if max(len(content), len(body)) > self.channel.connection.frame_max - 8:
            return b""
        return method + self._frame(2, content) + (self._frame(3, body) if body else b"")

    def _form(self, alike: Message, *, mandatory: bool) -> tuple[bytes, ...]:
        """Return the first frame of messages like ``alike``, and the shared parts of the second."""
        mark = uuid4().hex
        kinds = alike.priority, alike.content_type, alike.content_encoding
        properties = {**alike.properties, "correlation_id": mark}
        message = self.channel.prepare_message(b"", *kinds, {mark: None}, properties)
        arguments = _arguments(alike.exchange, alike.routing_key, mandatory)
        method = self._frame(1, pack(">HH", *spec.Basic.Publish) + arguments)
        begin, _, rest = message._serialize_properties().partition(dumps("F", ({mark: None},)))
        middle, _, end = rest.partition(dumps("s", (mark,)))
        return method, begin, middle, end

    def _header(self, name: str, value: Any) -> bytes:
        key = name, repr(value)  # not the value: 1, 1.0 and True are equal
        if (packed := self._headers.get(key)) is None:
            packed = dumps("F", ({name: value},))[4:]  # without the size of the table
            if len(key[1]) < MAX_KEPT:
                self._headers[key] = packed
        return packed

    def _frame(self, kind: int, content: bytes) -> bytes:
        return pack(">BHI", kind, self.channel_id, len(content)) + content + b"\xce"


def _arguments(exchange: str, routing_key: str, mandatory: bool) -> bytes:
    """Return the encoded arguments of the method Basic.Publish."""
    return bytes(dumps("Bssbb", (0, exchange, routing_key, mandatory, False)))
