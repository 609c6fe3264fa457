"""The frames of a message for RabbitMQ, filled into those that py-amqp made of one that is alike.

They are byte for byte those of py-amqp, which packs the headers of each message anew, in three
times the time. What is not like others, or fits no frame, is left to it.
"""

from __future__ import annotations

from collections.abc import Container
from struct import pack
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from amqp import spec
from amqp.method_framing import frame_writer
from amqp.serialization import dumps

from ..message import Message
from .outcome import PreparedMessage

#: Headers with longer values are no others' as well.
MAX_KEPT = 100


class Frames:
    """Those of one channel, which is kombu's but for its number."""

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
