"""A batch of messages for Redis that keeps every answer; on request, one transaction.

kombu's own batch reports that one command failed, but not which. And a Redis without memory refuses
some commands of a pipeline and takes later ones, as consumers free room: jobs of one ordering key
would overtake each other. A transaction is refused as a whole. kombu lets a channel supply its own
kind of batch, through ``create_publish_batch``.

One time limit covers the whole batch and its answers. Nothing is sent a second time.
"""

from __future__ import annotations

import time
from base64 import b64encode
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from ...exceptions import Unroutable
from ...text import get_logger
from ..message import Message
from .outcome import PreparedMessage

logger = get_logger("outbox_app.drain")

#: For how many seconds MULTI is not tried again after Redis refused it.
NO_MULTI_SECONDS = 60.0


class Transactions:
    """Finds out, and remembers, whether Redis or a proxy before it takes MULTI."""

    def __init__(self) -> None:
        self._ask_at = 0.0
        self._taken = False

    def are_taken(self, channel: Any, *, seconds: float) -> bool:
        if not self._taken and time.monotonic() >= self._ask_at:
            try:
                with closing(RedisBatch(channel, seconds=seconds, atomic=True)) as asked:
                    asked.flush()
                if asked.refusal:
                    raise asked.refusal
                self._taken = True
            except Exception as error:  # a proxy may also end the connection because of MULTI
                self.were_refused(error)
        return self._taken

    def were_refused(self, error: Exception) -> None:
        logger.warning("Redis takes no MULTI, jobs of one key go one by one error=%s", error)
        self._taken, self._ask_at = False, time.monotonic() + NO_MULTI_SECONDS


class RedisBatch:
    """A publish batch as kombu expects it, for one flush."""

    def __init__(self, channel: Any, *, seconds: float, atomic: bool) -> None:
        self.channel = channel
        self.atomic = atomic
        #: For each message that Redis has answered, the answers of its queues: values or
        #: exceptions, as Redis sent them.
        self.answers: list[list[Any]] = []
        #: ``begun``: a part of the batch may have left.
        self.begun = self.flushed = False
        #: The error if MULTI was refused: Redis then took or refused each message by itself.
        self.refusal: Exception | None = None
        self._deadline = time.monotonic() + seconds
        self._client = channel.client.client()  # has one connection of its own until close()
        self._pipeline = channel.client.pipeline(transaction=False)
        self._packed: list[bytes] = []
        #: The LPUSH command of each queue, without its message.
        self._heads: dict[str, bytes] = {}
        #: For each message, the numbers of the commands that deliver it, one per queue; no PEXPIRE.
        self._deliveries: list[list[int]] = []
        #: The command for similar messages, by the id() of their ``alike``: see ``_form``.
        self._forms: dict[int, tuple[bytes, list[str]]] = {}
        #: The first part of each delivery tag, which the number of the command completes.
        self._tag = str(uuid4())[:-8]

    def takes(self, item: PreparedMessage) -> bool:
        """Collect a message without kombu's producer; return False if only that can complete it."""
        if item.alike is not None and self._is_filled_in(item, item.alike):
            return True
        message = item.message
        if not message.is_finished or item.expiration is not None:
            return False
        prepared = self._prepared(message, item.row.body, message.headers, message.properties)
        self.publish(prepared, exchange=message.exchange, routing_key=message.routing_key)
        return True

    def _prepared(self, message: Message, body: bytes, headers: Any, properties: Any) -> Any:
        kinds = message.priority, message.content_type, message.content_encoding
        return self.channel.prepare_message(body, *kinds, headers, {**properties})

    def _is_filled_in(self, item: PreparedMessage, alike: Message) -> bool:
        """Collect a message by filling in the command that kombu made for a similar one."""
        if id(alike) not in self._forms:
            self._forms[id(alike)] = self._form(alike)
        queue_head, parts = self._forms[id(alike)]
        if not parts:
            return False
        head, headers, id_, tag, end = parts
        body, number = b64encode(item.row.body).decode(), len(self._packed)
        value = (
            f"{head}{body}{headers}{item.headers}{id_}{item.row.task_id}"
            f"{tag}{self._tag}{number:08x}{end}"
        )
        self._deliveries.append([number])
        self._packed.append(_command(queue_head, value.encode()))
        return True

    def _form(self, alike: Message) -> tuple[bytes, list[str]]:
        """Return the queue's LPUSH command, and the shared parts of a message's text.

        Return no parts if kombu makes anything but a single LPUSH for messages like ``alike``.
        """
        mark = uuid4().hex
        properties = {**alike.properties, "correlation_id": mark}
        prepared = self._prepared(alike, mark.encode(), {mark: 0}, properties)
        made = self._commands(prepared, exchange=alike.exchange, routing_key=alike.routing_key)
        if [name for name, _ in made] != ["lpush"]:
            return b"", []
        [(_, (queue, text))] = made
        body, tag = b64encode(mark.encode()).decode(), prepared["properties"]["delivery_tag"]
        parts = []
        for each in (body, f'{{"{mark}": 0}}', mark, str(tag)):
            part, _, text = text.partition(each)
            parts.append(part)
        return self._head(queue), [*parts, text] if text else []

    def publish(self, message: Any, **options: Any) -> None:
        """Collect the commands of a message. One that cannot be routed or encoded adds nothing."""
        made = self._commands(message, **options)
        if not made:
            raise Unroutable("Its queue was unbound meanwhile. Bind it, then requeue the job.")
        packed = [self._packed_command(name, args) for name, args in made]
        places = enumerate(made, len(self._packed))
        self._deliveries.append([place for place, (name, _) in places if name != "pexpire"])
        self._packed += packed

    def _commands(self, message: Any, **options: Any) -> list[tuple[str, Any]]:
        """Return the commands that kombu's channel adds to a batch for a message."""
        made: list[tuple[str, Any]] = []
        batch = SimpleNamespace(add=lambda name, *args: made.append((name, args)))
        self.channel.basic_publish(message, _publish_batch=batch, **options)
        return made

    def _packed_command(self, name: str, args: Any) -> bytes:
        if name != "lpush":
            return self._pack(name, *args)
        queue, message = args
        return _command(self._head(queue), self._client.connection.encoder.encode(message))

    def _head(self, queue: str) -> bytes:
        """Return the command that pushes to a queue, without the message at its end."""
        if (head := self._heads.get(queue)) is None:
            head = self._pack("lpush", queue, b"").removesuffix(b"$0\r\n\r\n")
            self._heads[queue] = head
        return head

    def _pack(self, name: str, *args: Any) -> bytes:
        getattr(self._pipeline, name)(*args)
        command, _ = self._pipeline.command_stack.pop()  # its keys have the channel's prefix
        return b"".join(self._client.connection.pack_command(*command))

    def flush(self) -> None:
        """Send the batch and read the answers. Raises if Redis is lost, or refuses all of it."""
        self.flushed = True
        connection = self._client.connection
        commands = self._packed
        if self.atomic:
            multi, exec_ = map(connection.pack_command, ("MULTI", "EXEC"))
            commands = [*multi, *commands, *exec_]
        connection.check_health()
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("The time of a batch was over before it was sent.")
        connection._sock.settimeout(left)
        self.begun = True
        # In one piece: redis-py would apply the time-out to each piece anew.
        connection.send_packed_command([b"".join(commands)], check_health=False)
        answers: list[Any] = []
        try:
            for _ in commands:
                answers.append(_read(connection, self._deadline))
        finally:
            if not self.atomic:
                self._keep(answers)
        connection._sock.settimeout(connection.socket_timeout)
        if self.atomic:
            *queued, done = answers
            if isinstance(queued[0], Exception) and not isinstance(done, list):
                # No transaction began, so Redis executed each of the following commands by itself.
                self.refusal = queued[0]
                self._keep(queued[1:])
                return
            if not isinstance(done, list):
                raise next((each for each in queued if isinstance(each, Exception)), done)
            self._keep(done)

    def discard(self) -> None:
        """Do nothing: kombu calls this for an aborted batch, which is not flushed."""

    def close(self) -> None:
        """Give the connection back. kombu calls this after a flush or a discard."""
        self._client.close()

    def _keep(self, answers: list[Any]) -> None:
        for places in self._deliveries:
            if places[-1] >= len(answers):
                break
            self.answers.append([answers[place] for place in places])


def _command(head: bytes, value: bytes) -> bytes:
    return b"%b$%d\r\n%b\r\n" % (head, len(value), value)


def _read(connection: Any, deadline: float) -> Any:
    connection._sock.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        return connection.read_response()
    except Exception as error:
        if connection._sock is None:  # redis-py has closed a failed connection
            raise
        return error
