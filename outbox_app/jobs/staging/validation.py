"""Checks of a job before any SQL: a failed INSERT would break the caller's transaction.

Celery's own rules apply: a job is refused only if it could never be sent or stored, or if a value
would be cut or aliased on the way. The limits are AMQP's (short strings of at most 255 bytes,
priority one octet; for some values only if the broker speaks AMQP), the columns' and the settings'.
Each error names the field, the expected value, the given value, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from amqp.serialization import dumps
from celery import Celery
from kombu.utils import json

from ...conf import outbox_settings
from ...database.encoding import unstorable
from ...exceptions import InvalidJob
from ...text import get_logger
from ..message import moment

if TYPE_CHECKING:
    from ...models import StagedJob
    from ..message import Message

logger = get_logger("outbox_app.staging")

#: AMQP 0-9-1, 4.2.5.3: short strings carry their length in one octet.
MAX_NAME_BYTES = 255
#: The width of the column, in characters; ids are not names, and AMQP's limit is counted in bytes.
MAX_ID_LENGTH = 255
#: An ``eta`` further away than this is refused: it is a mistake of units, or of the year.
MAX_ETA = timedelta(days=366)
#: A message larger than this is staged with a warning in the log, in bytes.
LARGE = 256 * 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def check_name(field: str, value: Any, *, empty: bool = False) -> str:
    """Return ``value`` if it can be stored and sent as a name."""
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


def as_key(name: str) -> str:
    """Return an ordering key for a name: itself, or its hash if it is too long or odd for a key."""
    try:
        return check_name("ordering_key", name)
    except InvalidJob:
        return sha256(name.encode()).hexdigest()


def check_call(name: str, options: Mapping[str, Any], *, app: Any) -> None:
    """Check what Celery takes as it is: the name of the task, and the headers of the caller."""
    check_name("task name", name)
    check_headers(options.get("headers"), name=name, task_id=options.get("task_id"), app=app)


def check_headers(headers: Any, *, name: str, task_id: Any, app: Celery) -> None:
    """Refuse user headers that cannot be sent, or that would replace the task's own."""
    if headers is None:
        return
    if not isinstance(headers, Mapping):
        raise InvalidJob(f"headers must be a mapping; got {headers!r}.")
    for key in headers:
        check_short_string("headers: a key", key, app)
    for key, own in (("id", task_id), ("task", name)):
        if key in headers and headers[key] != own:
            raise InvalidJob(
                f"headers: {key!r} would replace the task's own. Use task_id= or another key."
            )
    check_values(headers, app)


def check_values(headers: Mapping[str, Any], app: Celery) -> None:
    """Refuse headers with a value of no AMQP type if the app's broker speaks AMQP."""
    if not headers or not speaks_amqp(app):
        return
    try:
        dumps("F", (json.loads(json.dumps({**headers})),))
    except Exception as error:  # of any kind: the drainer would get the same one
        text = f"headers: AMQP takes no such value: {str(error).strip()}. Convert it to str."
        raise InvalidJob(text) from error


def check_short_string(field: str, value: Any, app: Celery) -> None:
    """Refuse a value that is no short string if the app's broker speaks AMQP; others take any."""
    if isinstance(value, str) and len(value.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
        return
    if speaks_amqp(app):
        raise InvalidJob(
            f"{field} must be a string of at most {MAX_NAME_BYTES} bytes (AMQP short string); got "
            f"{repr(value)[:60]}. Convert it to str, or take a shorter one."
        )


def speaks_amqp(app: Celery) -> bool:
    """Return whether the app's broker speaks AMQP, without contacting it."""
    connection: Any = app.amqp.producer_pool.connections.connection
    return bool(connection.transport.driver_type == "amqp")


def moment_of(field: str, value: Any, app: Celery) -> datetime | None:
    """Return ``eta`` or ``expires`` as a worker reads it."""
    try:
        return moment(value, app)
    except (TypeError, ValueError) as error:
        text = f"{field} must be a datetime, or a text in ISO 8601; got {value!r:.60}."
        raise InvalidJob(text) from error


def check_eta(eta: datetime | None) -> None:
    if eta is not None and eta - datetime.now(UTC) > MAX_ETA:
        raise InvalidJob(
            f"eta {eta.isoformat()} is further away than {MAX_ETA.days} days. Stage the job later."
        )


def check_priority(priority: Any, app: Celery) -> None:
    """Refuse a priority that is not one octet if the app's broker speaks AMQP; others take any."""
    if priority is None or (isinstance(priority, int) and 0 <= priority <= 255):
        return
    if speaks_amqp(app):
        raise InvalidJob(f"priority must be an integer from 0 to 255; got {priority!r}.")


def check_id(task_id: Any, app: Celery) -> str:
    check_short_string("task_id", task_id, app)
    text = str(task_id)
    if not 0 < len(text) <= MAX_ID_LENGTH or _UNSTORABLE.search(text):
        raise InvalidJob(
            f"task_id must have 1 to {MAX_ID_LENGTH} characters of valid Unicode without NUL; it "
            f"has {len(text)}, and begins with {text[:60]!r}."
        )
    return text


def check_job(
    job: StagedJob, message: Message, app: Celery, *, eta: datetime | None, using: str
) -> None:
    check_eta(eta)
    check_name("ordering_key", job.ordering_key, empty=True)
    check_name("app name", job.app, empty=True)
    check_name("queue", job.queue, empty=True)
    check_name("exchange", message.exchange, empty=True)
    check_name("routing_key", message.routing_key, empty=True)
    check_short_string("reply_to", message.properties.get("reply_to") or "", app)
    # With kombu's mark for a UUID, a date and the like, or with stamps: integers of any size.
    if '"__type__"' in job.envelope or message.headers.get("stamped_headers"):
        check_values(message.headers, app)
    if job.queue.startswith("amq."):
        raise InvalidJob(f"queue {job.queue!r}: names that begin with 'amq.' belong to the broker.")
    check_message_size(job)
    check_storable(job, "ordering_key", "app", "task", "task_id", "queue", using=using)


def check_storable(job: StagedJob, *names: str, using: str) -> None:
    """Refuse names that the database cannot store. The body is bytes, and the envelope ASCII."""
    for field in names:
        if why := unstorable(getattr(job, field), using=using):
            raise InvalidJob(f"{field} {getattr(job, field)[:60]!r} {why}")


def check_message_size(job: StagedJob) -> None:
    """Refuse a job that is larger than the setting allows; warn of a large one."""
    check_size(job)
    if job.size > LARGE:
        logger.warning(
            "Large job staged task=%s task_id=%s bytes=%d", job.task, job.task_id, job.size
        )


def check_size(job: Any) -> None:
    """Refuse a job, or a result, that is larger than the setting allows."""
    limit = outbox_settings().MAX_MESSAGE_BYTES
    if job.size > limit:
        raise InvalidJob(
            f"The message of {job} is {job.size} bytes; at most {limit} are possible "
            "(OUTBOX['MAX_MESSAGE_BYTES']). Store the data elsewhere and pass its key."
        )
