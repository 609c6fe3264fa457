"""``@subscriber``: declares who handles which events, and how.

Declaring reads no database. Modules named ``subscribers`` of the installed apps are imported when
Django is ready, so that every process knows the same subscriptions. A handler is given a page of
events inside a transaction that also advances the cursor: what it writes to that database happens
exactly once; mail and HTTP calls happen at least once, so leave those to a task.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from celery.app.task import Task
from django.db.models import Max

from ...aliases import model_alias
from ...exceptions import OutboxError
from ...jobs.staging.stage import stage_many
from ...jobs.staging.validation import as_key
from ...text import storable
from ..exceptions import InvalidSubscriber, UnknownLog, UnknownSubscription
from ..log.filter import EventFilter
from ..log.reader import LogReader
from ..log.record import RecordedEvent
from ..log.registry import log_named
from ..models import EventLog

Handler = Callable[[list[RecordedEvent]], Any]
OnError = Literal["stop", "park"]
OnGap = Literal["off", "park", "skip"]
Start = Literal["beginning", "now"]

MAX_NAME = 80
MAX_TYPE = 255
MAX_PARTITIONS = 1024
#: How inspect names a partial object, or a method, that cannot be called at all.
_UNFIT = ("incorrect arguments", "invalid method signature")


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A declared subscription. The fields are the arguments of ``subscriber``."""

    name: str
    handle: Handler
    types: tuple[str, ...] | None = None
    topics: tuple[str, ...] | None = None
    log_names: tuple[str, ...] = ("outbox_events.Event",)
    partitions: int = 1
    on_error: OnError = "stop"
    start: Start = "beginning"
    batch_size: int | None = None
    on_gap: OnGap = "off"
    max_backtracks: int = 20
    by_time: bool = False
    read_from: str | None = None

    @property
    def logs(self) -> list[type[EventLog]]:
        """The logs it reads. Raises ``UnknownLog``."""
        try:
            # A log may be named twice, by its table and by its label.
            return list(dict.fromkeys(map(log_named, self.log_names)))
        except UnknownLog as error:
            raise UnknownLog(f"Subscription {self.name!r} cannot run. {error}") from None

    @property
    def using(self) -> str:
        """The alias of its logs, which holds its cursors too. Raises ``InvalidSubscriber``."""
        aliases = {model_alias(log) for log in self.logs}
        if len(aliases) > 1:
            raise InvalidSubscriber(
                f"Subscription {self.name!r} reads logs on {', '.join(sorted(aliases))}: its "
                "cursors and effects could not be committed together. Declare one for each alias."
            )
        return aliases.pop()

    @property
    def reads(self) -> dict[str, list[str] | None]:
        """What it reads, as kept on its row for processes that do not have its code."""
        topics, types = (names and list(names) for names in (self.topics, self.types))
        tables = [log._meta.db_table for log in self.logs]
        return {"logs": tables, "topics": topics, "types": types}  # type: ignore[dict-item]

    @property
    def fault(self) -> str:
        """Why no process can run it, such as a log that does not exist; empty if it can be run."""
        try:
            _ = self.using
        except OutboxError as error:
            return str(error)
        return ""

    def newest_positions(self) -> Iterator[tuple[str, int]]:
        """Yield the table of each log, and its highest position; 0 if it is empty."""
        for log in self.logs:
            rows = log._base_manager.using(self.read_from or self.using)
            yield log._meta.db_table, rows.aggregate(Max("id"))["id__max"] or 0

    def reader(
        self, log: type[EventLog], *, using: str, only: EventFilter | None = None
    ) -> LogReader:
        """Return a reader of one of its logs. The caller closes it."""
        return LogReader(log, using=self.read_from or using, only=only, by_time=self.by_time)

    def only(self, part: int) -> EventFilter:
        """Return which rows a partition reads: to notice a gap, it has to read all versions."""
        if self.on_gap == "off":
            return EventFilter(self.topics, self.types, self.partitions, part)
        return EventFilter(parts=self.partitions, part=part)


_subscribers: dict[str, Subscriber] = {}


def subscriber(
    name: str,
    *,
    types: Sequence[str] | None = None,
    topics: Sequence[str] | None = None,
    logs: Sequence[type[EventLog] | str] | None = None,
    partitions: int = 1,
    on_error: OnError = "stop",
    start: Start = "beginning",
    batch_size: int | None = None,
    on_gap: OnGap = "off",
    max_backtracks: int = 20,
    by_time: bool = False,
    read_from: str | None = None,
    task: Task[Any, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a subscription; decorates the function that handles its events.

    Args:
        name: Unique: it identifies the subscription's cursors. At most 80 characters.
        types: Exact types, or prefixes that end in ``*``: ``["order.*"]``. Default: all.
        topics: Exact topics. Default: all.
        logs: Models derived from ``EventLog``, or their labels. Default: ``[Event]``.
        partitions: Parts that may be handled at the same time; order holds inside a stream.
        on_error: "stop" (default): a page whose handler raises is tried again, with back-off, and
            nothing after it is handled. "park": after three attempts the streams at fault are
            parked, and the others are handled.
        start: Where the subscription begins when it first runs: "beginning" (default) or "now".
        batch_size: Events of a page. Default: the setting PAGE_SIZE.
        on_gap: What to do about versions that are missing in a stream: "off" (default; a window
            misses none), "park" or "skip" them after ``max_backtracks``, with a row in ``Gap``.
            Versions before the first one that the log has of a stream count as pruned.
        max_backtracks: How often to look for a missing version before that.
        by_time: Read by time, a second behind, where no window is possible: from a replica, or an
            imported log. Needs ``on_gap``, which brings back events that commit late, except the
            last event of a stream. The log needs an index on ``recorded_at, id``.
        read_from: With ``by_time``, the alias that the logs are read from, such as a replica's.
            Cursors and effects stay with the logs.
        task: Stage this task for each event, in the order of its stream. A decorated function then
            returns the task's arguments for an event; without a function, the task gets the event
            as a dictionary.

    Returns:
        A decorator; with ``task`` it need not be used.

    Raises:
        InvalidSubscriber: An argument is out of bounds, or contradicts another one.
    """
    declared = Subscriber(
        name=name,
        handle=lambda events: None,  # replaced below
        types=_names("types", types),
        topics=_names("topics", topics),
        log_names=_log_names(logs),
        partitions=partitions,
        on_error=on_error,
        start=start,
        batch_size=batch_size,
        on_gap=on_gap,
        max_backtracks=max_backtracks,
        by_time=by_time,
        read_from=read_from,
    )
    _check(declared)
    if task is not None:
        if not isinstance(task, Task):
            raise InvalidSubscriber(f"Subscription {name!r}: task must be a task; got {task!r}.")
        register(replace(declared, handle=staging(declared, task)))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_handler(name, function)
        handle = staging(declared, task, function) if task else function
        register(replace(declared, handle=handle))
        return function

    return decorate


def staging(
    declared: Subscriber,
    task: Task[Any, Any],
    arguments: Callable[[RecordedEvent], Sequence[Any]] = lambda event: [event.to_dict()],
) -> Handler:
    """Return a handler that stages a task for each event, in the order of its stream."""

    def stage_tasks(events: list[RecordedEvent]) -> None:
        jobs = (task.signature(tuple(arguments(e)), ordering_key=as_key(e.stream)) for e in events)
        stage_many(jobs, using=declared.using)

    stage_tasks.__qualname__ = f"staging({task.name})"  # tells tasks apart (_origin)
    return stage_tasks


def register(declared: Subscriber) -> None:
    """Make a subscription known to this process. Raises ``InvalidSubscriber`` for a taken name."""
    other = _subscribers.get(declared.name)
    if other is not None and _origin(other.handle) != _origin(declared.handle):
        raise InvalidSubscriber(
            f"Two subscriptions have the name {declared.name!r}: {_origin(other.handle)} and "
            f"{_origin(declared.handle)}. They would share a cursor. Rename one."
        )
    _subscribers[declared.name] = declared


def all_subscribers() -> list[Subscriber]:
    """Return the subscriptions that are known, by name."""
    return [_subscribers[name] for name in sorted(_subscribers)]


def subscriber_named(name: str) -> Subscriber:
    """Return a subscription. Raises ``UnknownSubscription``."""
    if name not in _subscribers:
        known = ", ".join(sorted(_subscribers)) or "none"
        raise UnknownSubscription(
            f"No subscription is named {name!r}. Known: {known}. Declare them in a module named "
            "subscribers of an installed app."
        )
    return _subscribers[name]


def _origin(handle: Handler) -> str:
    return f"{handle.__module__}.{getattr(handle, '__qualname__', handle)}"


def _names(field: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    values = tuple(names)  # an iterator yields them only once
    if isinstance(names, str) or not all(isinstance(n, str) and n for n in values):
        raise InvalidSubscriber(f"{field} must be a list of strings; got {names!r}.")
    for name in values or ("",):
        star = "*" in (name[:-1] if field == "types" else name)
        if star or not values or len(name) > MAX_TYPE or storable(name) != name:
            rule = "exact types, or prefixes that end in *" if field == "types" else "exact topics"
            raise InvalidSubscriber(f"{field}={names!r} would match nothing: give {rule}.")
    return values


def _log_names(logs: Sequence[type[EventLog] | str] | None) -> tuple[str, ...]:
    names = []
    for log in ["outbox_events.Event"] if logs is None else logs:
        if not isinstance(log, str):
            is_log = isinstance(log, type) and issubclass(log, EventLog)
            if not is_log or log._meta.abstract:
                raise InvalidSubscriber(f"logs: {log!r} is no concrete model of EventLog.")
            log = log._meta.label
        names.append(log)
    if not names or len(set(names)) < len(names):
        raise InvalidSubscriber(f"logs must name each log once, and at least one; got {logs!r}.")
    return tuple(names)


def _check(declared: Subscriber) -> None:
    name = declared.name
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidSubscriber(f"A name has 1 to {MAX_NAME} printable characters; got {name!r}.")
    if fault := next(_faults(declared), None):
        raise InvalidSubscriber(f"Subscription {name!r}: {fault}")


def _faults(declared: Subscriber) -> Iterator[str]:
    for field, least, most in (("partitions", 1, MAX_PARTITIONS), ("max_backtracks", 0, 10**6)):
        value = getattr(declared, field)
        if type(value) is not int or not least <= value <= most:
            yield f"{field} must be an integer from {least} to {most}; got {value!r}."
    size = declared.batch_size
    if size is not None and (type(size) is not int or size < 1):
        yield "batch_size must be at least 1."
    for field, choices in (("on_error", OnError), ("start", Start), ("on_gap", OnGap)):
        value = getattr(declared, field)
        if value not in get_args(choices):
            yield f"{field} must be one of {get_args(choices)}; got {value!r}."
    if declared.by_time and declared.on_gap == "off":
        yield (
            'by_time alone would lose events that commit late. Give on_gap="park" or on_gap="skip".'
        )
    if declared.read_from is not None and not declared.by_time:
        yield (
            f"read_from={declared.read_from!r} needs by_time=True: a replica does not show which "
            "transactions are still open."
        )


def _check_handler(name: str, function: Any) -> None:
    text = f"Subscription {name!r}: {function!r} cannot handle events: "
    if not callable(function):
        raise InvalidSubscriber(text + "it is not callable.")
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(function) for is_kind in kinds):
        raise InvalidSubscriber(text + "its body would never run. Write a plain function.")
    try:
        inspect.signature(function).bind([])
    except (TypeError, ValueError) as error:
        if isinstance(error, ValueError) and not any(each in str(error) for each in _UNFIT):
            return  # a compiled function need not tell its arguments
        raise InvalidSubscriber(
            text + f"it must take one argument, the list of events ({error})."
        ) from error
