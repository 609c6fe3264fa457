"""What a row refuses, before any SQL: a failed INSERT would break the caller's transaction.

Jobs keep Celery's own rules: only what could never be sent, or would be cut or aliased on the way,
is refused. The limits are AMQP's (short strings of at most 255 bytes, priority one octet) and the
settings'. Each error names the field, what was expected, what came, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import Celery
from django.utils import timezone

from ..conf import settings
from ..exceptions import InvalidJob, UnknownTask
from ..text import get_logger

if TYPE_CHECKING:
    from ..models import StagedJob
    from .message import Message

logger = get_logger("outbox_app.intake")

#: AMQP 0-9-1, 4.2.5.3: short strings carry their length in one octet.
MAX_NAME_BYTES = 255
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_name(field: str, value: Any, *, empty: bool = False) -> str:
    """Return ``value`` if it can be stored and sent as a name.

    Raises:
        InvalidJob: Not a string, empty, longer than 255 bytes of UTF-8, not UTF-8, or with control
            characters.
    """
    if not isinstance(value, str):
        raise InvalidJob(f"{field} must be a string; got {value!r}. Convert it to str.")
    if not value and not empty:
        raise InvalidJob(f"{field} must not be empty.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidJob(f"{field} {value!r} is not valid Unicode: {error}.") from error
    if size > MAX_NAME_BYTES:
        raise InvalidJob(
            f"{field} is {size} bytes long; at most {MAX_NAME_BYTES} are possible "
            f"(AMQP short string). It begins with {value[:60]!r}."
        )
    if _CONTROL.search(value):
        raise InvalidJob(f"{field} {value[:60]!r} has control characters. Remove them.")
    return value


def check_headers(headers: Any, *, name: str, task_id: str | None) -> None:
    """Refuse user headers that could not travel, or that would replace the task's own.

    Raises:
        InvalidJob: Not a mapping, a key that is no string, CR or LF, or another ``id`` or ``task``.
    """
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise InvalidJob(f"headers must be a mapping; got {headers!r}.")
    for key, value in headers.items():
        if not isinstance(key, str):
            raise InvalidJob(f"headers: the key {key!r} must be a string.")
        check_name("headers: a key", key)
        if any(c in text for text in (key, value) if isinstance(text, str) for c in "\r\n"):
            raise InvalidJob(f"headers: {key!r} has a line break. Remove CR and LF.")
    for key, own in (("id", task_id), ("task", name)):
        if key in headers and headers[key] != own:
            raise InvalidJob(
                f"headers: {key!r} would replace the task's own. Use task_id= or another key."
            )


def check_task(name: str, app: Celery) -> None:
    """Refuse a task that the app does not know, in strict mode and where its tasks are loaded.

    Raises:
        UnknownTask: See above.
        InvalidJob: The name cannot be sent.
    """
    check_name("task name", name)
    loaded: bool = app.finalized  # type: ignore[attr-defined]
    if settings().STRICT_TASK_NAMES and loaded and name not in app.tasks:
        raise UnknownTask(
            f"The Celery app {app.main!r} has no task {name!r}. Import its module, correct the "
            "name, or turn OUTBOX['STRICT_TASK_NAMES'] off."
        )


def check_eta(eta: datetime | None) -> None:
    """Refuse a due time beyond ``MAX_ETA``.

    Raises:
        InvalidJob: See above.
    """
    limit = settings().MAX_ETA
    if eta is not None and eta - timezone.now() > timedelta(seconds=limit):
        raise InvalidJob(
            f"eta {eta.isoformat()} is further away than {limit:.0f} seconds "
            "(OUTBOX['MAX_ETA']). Stage the job later, or raise the setting."
        )


def check_priority(priority: Any) -> None:
    """Refuse a priority that AMQP does not carry.

    Raises:
        InvalidJob: Not an integer from 0 to 255, and not None.
    """
    if priority is None:
        return
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 255:
        raise InvalidJob(f"priority must be an integer from 0 to 255; got {priority!r}.")


def check_job(job: StagedJob, message: Message) -> None:
    """Refuse a row that a column or the broker could not hold.

    Raises:
        InvalidJob: See the module.
    """
    check_name("task_id", job.task_id)
    check_name("ordering_key", job.ordering_key, empty=True)
    check_name("app name", job.app, empty=True)
    check_name("queue", job.queue, empty=True)
    check_name("exchange", message.exchange, empty=True)
    check_name("routing_key", message.routing_key, empty=True)
    check_name("reply_to", message.properties.get("reply_to") or "", empty=True)
    if job.queue.startswith("amq."):
        raise InvalidJob(f"queue {job.queue!r}: names that begin with 'amq.' belong to the broker.")
    limit = settings().MAX_MESSAGE_BYTES
    if job.size > limit:
        raise InvalidJob(
            f"The message of {job} is {job.size} bytes; at most {limit} are possible "
            "(OUTBOX['MAX_MESSAGE_BYTES']). Store the data elsewhere and pass its key."
        )
    if job.size > settings().WARN_MESSAGE_BYTES:
        logger.warning(
            "Large job staged task=%s task_id=%s bytes=%d", job.task, job.task_id, job.size
        )
