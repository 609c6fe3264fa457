"""Which calls are staged and which are sent.

=====================================================  ==========================================
where the call happens                                 what happens
=====================================================  ==========================================
inside ``atomic()`` on the outbox's alias              staged, in that transaction
outside any transaction                                ``OUTBOX["OUTSIDE"]``: send, stage or refuse
inside ``atomic()`` on another alias only              refused: it would not be atomic
autocommit off, outside ``atomic()``                   refused: it would be sent before the commit
``producer=``, ``connection=``; or mode not "stage"    sent: it was asked for (see ``mode_of``)
``retry()``, ``replace()``, the worker's follow-ups    sent: a rollback would lose them
=====================================================  ==========================================
"""

# Where it says "send", or "sent" in the last line, a task with a receipt is staged all the same if
# its row is committed at once: only a row can wait for a receipt. A retry is not: it has its row.

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

from celery.app import amqp as celery_amqp
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...aliases import outbox_alias
from ...capability import all_doors, lines_to_add
from ...conf import outbox_settings
from ...database.transactions import is_atomic, is_in_test, lacks_autocommit, open_transactions
from ...exceptions import NotAtomic
from ..context import let
from .receipt import has_receipts, receipt_of

Mode = Literal["stage", "send", "shadow"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: True while a worker sends the follow-ups of a task: links, chain steps, the body of a chord. If
#: this Celery has no such flag, all that a worker sends outside a transaction counts as follow-up.
_follow_up: ContextVar[bool] = getattr(
    celery_amqp, "_callback_publish_retry", ContextVar("outbox_app_follow_up", default=True)
)


class Around(NamedTuple):
    """What surrounds a call, in its thread or greenlet. Each block sets a part of it."""

    #: Inside ``stage()``: the alias on which all that any app sends is staged, and its options.
    using: str = ""
    ordering_key: str = ""
    immediate: bool | None = None
    #: Inside ``Task.replace()``, which raises when it has sent.
    is_replacing: bool = False
    #: While a result backend records a part of a chord, and may send the body. Celery's own flag
    #: for follow-ups is not set by all backends (``django-db`` does not set it).
    is_chord_part: bool = False
    #: Inside ``send_task``: the name of a task that is staged, "" for one that is sent.
    staged: str | None = None
    #: The task whose receivers of ``after_task_publish`` the drain calls.
    drained: str = ""
    #: The limit of the receipt that all that is staged inside has, for a caller who chooses it.
    receipt: int | None = None


_NOTHING = Around()
around: ContextVar[Around] = ContextVar("outbox_app_around", default=_NOTHING)


def surrounded(**part: Any) -> AbstractContextManager[None]:
    """Set a part of what surrounds the calls of a block."""
    return let(around, around.get()._replace(**part))


def force_staging(
    *,
    using: str,
    ordering_key: str = "",
    immediate: bool | None = None,
    receipt: int | None = None,
) -> AbstractContextManager[None]:
    """Stage everything that any app sends inside the block, on the alias ``using``."""
    return surrounded(using=using, ordering_key=ordering_key, immediate=immediate, receipt=receipt)


class Call:
    """A call of ``send_task``, with all that decides on it, read once.

    Raises:
        NotAtomic: It may be neither staged nor sent here.
    """

    def __init__(
        self,
        app: Any,
        name: str,
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        *,
        using: str | None = None,
        ordering_key: str = "",
        immediate: bool | None = None,
    ) -> None:
        self.app, self.name, self.options = app, name, options
        self.around = around.get()
        self.using = using
        self.ordering_key = ordering_key or self.around.ordering_key
        self.immediate = immediate
        #: The attribute ``immediate`` of the task.
        self.own_immediate = getattr(loaded_task(app, name), "immediate", None)
        self.stages_by_itself = stages_by_itself(app)
        self.mode = mode_here(app, name, args, kwargs)
        #: The limit of its receipt in seconds, or None.
        self.receipt = self._find_receipt()
        self.is_by_hand = is_by_hand(options)
        self.comes_before_an_error = comes_before_an_error(options)
        #: The alias to stage on; None: the task is sent.
        self.alias = None if self.is_by_hand else self.alias_in(self.mode)
        if ordering_key and self.mode != "shadow" and self.stages_by_itself:
            self._check_order()

    @property
    def is_immediate(self) -> bool:
        asked = [self.immediate, self.around.immediate, self.own_immediate]
        chosen = next((each for each in asked if each is not None), None)
        return outbox_settings().IMMEDIATE if chosen is None else chosen

    def alias_in(self, mode: Mode) -> str | None:
        """Return the alias to stage on if the task has this mode, or None to send it."""
        forced = self.around.using
        if not forced and not self.stages_by_itself:
            return None
        alias = self.using or forced or outbox_alias()
        if not forced and self.comes_before_an_error:
            return alias if mode == "stage" and self._is_replacement(alias) else None
        if mode != "stage":
            return alias if is_in_test(alias) else None  # no test needs a broker
        if is_atomic(alias) or alias == forced:
            return alias
        if self._follows_a_task():
            staged = connections[alias].in_atomic_block or self._commits_alone(alias)
            return alias if staged else None
        return alias_outside(self.name, alias, has_receipt=self.receipt is not None)

    def _find_receipt(self) -> int | None:
        if self.around.receipt is not None:
            return self.around.receipt
        task = loaded_task(self.app, self.name)
        receipt = receipt_of(task, self.name) if apps.models_ready else None
        return receipt.limit if receipt else None

    def _is_replacement(self, alias: str) -> bool:
        """Return whether ``replace()`` sends a task with a receipt where no rollback undoes it.

        Never a retry: its message has the header of a row, which stays.
        """
        return not self.options.get("retries") and self._commits_alone(alias)

    def _commits_alone(self, alias: str) -> bool:
        """Return whether the row of a task with a receipt would be committed at once."""
        connection = connections[alias]
        in_transaction = connection.in_atomic_block or lacks_autocommit(connection)
        return self.receipt is not None and not in_transaction

    def _follows_a_task(self) -> bool:
        follows = self.options.get("parent_id") or self.around.is_chord_part
        return bool(follows or (self.app.current_worker_task and _follow_up.get()))

    def _check_order(self) -> None:
        """Refuse an ordering key if the call is sent: it would overtake staged jobs of the key.

        Tasks that a worker sends by itself are sent all the same, or the work would be lost.
        """
        if self.comes_before_an_error or self._follows_a_task():
            return
        alias = self.alias if self.mode == "stage" else None
        in_order = self.around.using or outbox_settings().OUTSIDE == "stage" or self.receipt
        if not alias or not (in_order or is_atomic(alias)):
            using = self.using or outbox_alias()
            if self.mode != "stage":
                where, what = f"in the mode {self.mode!r}", "Give the task the mode 'stage'"
            elif not is_atomic(using):  # Celery itself sends a group by hand
                where = f"outside a transaction on {using!r}"
                what = f"Open transaction.atomic(using={using!r})"
            else:
                where, what = "with producer= or connection=", "Leave that argument out"
            raise NotAtomic(
                f"{self.name} was called with an ordering_key, but {where}: it would be sent at "
                f"once, ahead of staged jobs with that key. {what}, or leave the key out."
            )


def alias_outside(name: str, alias: str, *, has_receipt: bool = False) -> str | None:
    """Return the alias to stage on for a call outside its transactions, or None to send it.

    A job with a receipt is not sent: it would have no row. The call is refused if another
    transaction is open, with which its row would not be atomic.
    """
    outside = outbox_settings().OUTSIDE
    if lacks_autocommit(connections[alias]):
        if outside == "stage":
            return alias
        raise NotAtomic(
            f"{name} was called with autocommit off on {alias!r} and outside atomic(): it "
            f"would be sent before the commit. Open transaction.atomic(using={alias!r})."
        )
    if others := open_transactions():
        raise NotAtomic(
            f"{name} was called inside atomic(using={others[0]!r}), but jobs are staged on "
            f"{alias!r}: it would not be atomic. Open atomic(using={alias!r}), or call "
            f"apply_async(using={others[0]!r}) if that has the outbox's tables and a drainer."
        )
    if outside == "refuse":
        raise NotAtomic(
            f"{name} was called outside a transaction, and OUTBOX['OUTSIDE'] is 'refuse'. "
            f"Open transaction.atomic(using={alias!r}), or give apply_async() producer= to send it."
        )
    # In the transaction of a test, stage instead of sending, so that no test needs a broker.
    is_staged = outside == "stage" or has_receipt or connections[alias].in_atomic_block
    return alias if is_staged else None


def may_stage(app: Any) -> bool:
    """Return whether a call of an app may be staged here, on some alias."""
    if around.get().using:
        return True
    if not stages_by_itself(app):
        return False
    # The outbox's connection counts even if nothing has used it yet.
    used = [connections[outbox_alias()], *connections.all(initialized_only=True)]
    outside = outbox_settings().OUTSIDE
    may_be_outside = outside != "send" or has_receipts(app)
    return may_be_outside or any(c.in_atomic_block or lacks_autocommit(c) for c in used)


def stages_by_itself(app: Any) -> bool:
    """Return whether an app's own calls may be staged; a plain app stages in ``stage()`` only."""
    # Without django.setup() there is no outbox, and Celery's own calls work as before.
    return bool(app.stages_by_itself and apps.models_ready)


def comes_before_an_error(options: Mapping[str, Any]) -> bool:
    """Return whether ``retry()`` or ``replace()`` sends: they raise next, which undoes a row."""
    return bool(options.get("retries") or around.get().is_replacing)


def is_by_hand(options: Mapping[str, Any]) -> bool:
    """Return whether a call has its own producer or connection, and so is sent in any mode."""
    return any(options.get(key) for key in ("producer", "publisher", "connection"))


def mode_here(app: Any, name: str, args: Any = None, kwargs: Any = None) -> Mode:
    """Return the mode of a call made here: inside ``stage()`` it is always "stage"."""
    if around.get().using:
        return "stage"
    return mode_of(app, name, args, kwargs) if stages_by_itself(app) else "send"


def mode_of(app: Any, name: str, args: Any = None, kwargs: Any = None) -> Mode:
    """Return the mode of a task, which decides what its calls do.

    It is the task's attribute ``outbox``, else the setting. "stage" uses the outbox, "send" is
    plain Celery, and "shadow" is "send" with a record, which the app ``outbox_app.shadow`` compares
    with what was committed. A task of Celery's own that runs another one (``celery.map`` and the
    like, the poll of a chord) has the mode of that task, which its arguments tell.
    """
    name = called_for(name, args, kwargs)
    mode: Mode | None = own_mode(app, name)
    if mode is None:
        pattern = deciding_pattern(name)
        mode = "stage" if pattern is None else outbox_settings().TASK_MODES[pattern]
    if mode not in MODES:
        raise ImproperlyConfigured(
            f"The mode of task {name} is {mode!r}; expected one of "
            f"{', '.join(map(repr, MODES))}. Correct its attribute outbox, or "
            "OUTBOX['TASK_MODES']."
        )
    return mode


def own_mode(app: Any, name: str) -> Any:
    """Return the mode in a task's own declaration: ``@app.task(outbox="send")``."""
    return getattr(loaded_task(app, name), "outbox", None)


def loaded_task(app: Any, name: str) -> Any:
    """Return the task of this name if the app has it; import no modules."""
    try:  # ``app.tasks`` takes in what is declared so far, unless the project has to ask for that
        return (app.tasks if app.autofinalize else app._tasks)[name]
    except KeyError:
        return None


def deciding_pattern(name: str) -> str | None:
    """Return the first pattern of TASK_MODES that matches a task's name."""
    patterns = outbox_settings().TASK_MODES
    return next((each for each in patterns if fnmatchcase(name, each)), None)


def called_for(name: str, args: Any, kwargs: Any) -> str:
    try:
        if name == "celery.chord_unlock":
            inner = args[1]
        elif name in ("celery.chain", "celery.group"):  # a chord's body may be one
            inner = kwargs["tasks"][0]
        elif name in ("celery.map", "celery.starmap"):
            inner = kwargs["task"]
        else:
            return name
        return called_for(inner["task"], inner["args"], inner["kwargs"])
    except (LookupError, TypeError):  # called by hand, with any arguments
        return name


def shadow_mode() -> Any:
    """Return the module of shadow mode.

    Raises:
        ImproperlyConfigured: Its app is not installed.
    """
    for doors in all_doors():
        if doors.recorder:
            return doors.recorder
    raise ImproperlyConfigured(
        "A task has the mode 'shadow', and INSTALLED_APPS does not have outbox_app.shadow. "
        + lines_to_add(["outbox_app.shadow"])
    )
