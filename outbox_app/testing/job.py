"""A staged job as a test sees it: decoded, comparable, executable.

A ``Job`` is decoded and executed as by a worker of its Celery app, with these differences:
``retry()`` sends nothing, ``replace()`` sends after the task has ended, and no result is stored but
those of the parts of a chord.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest.mock import patch

from celery import _state, states
from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.exceptions import Ignore
from celery.utils.nodenames import gethostname
from kombu import serialization
from kombu.message import Message as KombuMessage

from ..jobs.message import Message, moment
from ..jobs.staging.sending import celery_app, load_tasks
from ..models import StagedJob

#: The most jobs, events or commands that a failure message lists.
LISTED = 20


@dataclass(frozen=True, slots=True)
class Job:
    """A staged job, decoded."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    #: Empty if the job has no order.
    ordering_key: str
    queue: str
    #: When the job is due, or None if it is due now.
    eta: datetime | None
    headers: dict[str, Any]
    task_id: str
    #: The row, with its message as bytes.
    row: StagedJob = field(repr=False, compare=False)
    #: The contents of ``self.request`` in a worker.
    request: dict[str, Any] = field(repr=False, compare=False)

    def __str__(self) -> str:
        arguments = [repr(arg) for arg in self.args]
        arguments += [f"{name}={value!r}" for name, value in self.kwargs.items()]
        text = f"{self.task}({', '.join(arguments)}) queue={self.queue!r}"
        if self.ordering_key:
            text += f" ordering_key={self.ordering_key!r}"
        return text if self.eta is None else f"{text} eta={self.eta.isoformat()}"

    @classmethod
    def of(cls, row: StagedJob) -> Job:
        """Decode a row as a worker of its Celery app would, and refuse what the worker refuses."""
        app = celery_app(row.app)
        accept = app.conf.accept_content if app else ["json"]
        message = Message.loads(row.envelope)
        args, kwargs, embedded = KombuMessage(
            body=bytes(row.body),  # type: ignore[arg-type]
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=message.headers,
            accept=serialization.prepare_accept_content(accept),
        ).payload
        request = {**message.headers, **embedded}
        request["delivery_info"] = {
            "exchange": message.exchange,
            "routing_key": message.routing_key,
            "priority": message.priority,
            "redelivered": False,
        }
        return cls(
            task=row.task,
            args=list(args),
            kwargs=kwargs,
            ordering_key=row.ordering_key,
            queue=row.queue,
            eta=moment(request.get("eta"), app) if app else row.available_at,
            headers=message.headers,
            task_id=row.task_id,
            row=row,
            request={**message.properties, **request},
        )

    @property
    def has_expired(self) -> bool:
        """Return whether a worker would revoke the job as expired, now or when it is due."""
        app, now = celery_app(self.row.app), datetime.now(UTC)
        expires = moment(self.request.get("expires"), app) if app else None
        return expires is not None and max(now, self.eta or now) > expires

    def matches(
        self,
        task: str,
        args: Iterable[Any] | None,
        kwargs: Mapping[str, Any] | None,
        ordering_key: str | None,
    ) -> bool:
        """Return whether the job has these values. None matches any value."""
        return (
            self.task == task
            and (args is None or self._holds(list(args), self.args))
            and (kwargs is None or self._holds(dict(kwargs), self.kwargs))
            and (ordering_key is None or self.ordering_key == ordering_key)
        )

    def execute(self) -> Job | None:
        """Execute the job in this process, and raise what the task raises.

        Signatures given to ``replace()`` are sent, as Celery does. If the task called ``retry()``,
        return the job to execute again.
        """
        app = celery_app(self.row.app)
        if app is None:
            raise AssertionError(f"No Celery app named {self.row.app!r} is loaded to run {self}.")
        load_tasks(app)
        task = app.tasks.get(self.task)
        if task is None:
            raise AssertionError(f"The Celery app {self.row.app!r} has no task to run {self}.")
        # Eager: retry() sends nothing and no result is stored, except for the parts of a chord,
        # whose results its body needs.
        request = {**self.request, "hostname": gethostname(), "is_eager": True}
        trace = build_tracer(self.task, task, app=app, eager=not request.get("chord"))
        replacements: list[Signature[Any]] = []
        # In a worker, tasks that are sent without naming an app go to the worker's own app.
        with patch.object(_state._tls, "current_app", app):  # type: ignore[attr-defined]
            with patch.object(task, "on_replace", partial(_keep, replacements)):
                info = trace(self.task_id, self.args, self.kwargs, request).info
            for signature in replacements:
                # After the task has ended, as it may have called replace() inside a transaction.
                signature.delay()
        if info and info.state not in (states.IGNORED, states.REJECTED, states.RETRY):
            raise info.retval
        # None: the task has ended, or has raised a Retry of its own making.
        retry = info.retval.sig if info and info.state == states.RETRY else None
        if retry is None:
            return None
        request["retries"] = retry.options["retries"]
        return replace(self, args=retry.args, kwargs=retry.kwargs, request=request)

    def _holds(self, expected: Any, stored: Any) -> bool:
        """Compare the values as they are, or as this message would hold them (tuples as lists)."""
        if expected == stored:
            return True
        content_type = Message.loads(self.row.envelope).content_type
        name = serialization.registry.type_to_name[content_type]  # type: ignore[attr-defined]
        try:
            _, encoding, data = serialization.dumps(expected, serializer=name)
        except Exception:  # a value that cannot be encoded cannot have been staged
            return False
        decoded = serialization.loads(data, content_type, encoding, accept=[content_type])
        return bool(decoded == stored)


def _keep(signatures: list[Signature[Any]], signature: Signature[Any]) -> None:
    signatures.append(signature)
    raise Ignore("Replaced by new task")
