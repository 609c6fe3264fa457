"""The mode of a task decides what its calls do: from its attribute ``outbox``, else the setting.

"stage" uses the outbox, "send" is plain Celery, and "shadow" is "send" with a record, which the app
``outbox_app.shadow`` compares with what was committed. A task of Celery's own that runs another
task (``celery.map`` and the like, the poll of a chord) has the mode of that task. A call inside
``stage()`` is staged in any mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from django.core.exceptions import ImproperlyConfigured

from ...capability import all_doors, lines_to_add
from ...conf import outbox_settings

Mode = Literal["stage", "send", "shadow"]
MODES: tuple[Mode, ...] = get_args(Mode)


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


def mode_of(app: Any, name: str, args: Any = None, kwargs: Any = None) -> Mode:
    """Return the mode of a call; its arguments tell which task one of Celery's own tasks runs."""
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


def is_by_hand(options: Mapping[str, Any]) -> bool:
    """Return whether a call has its own producer or connection, and so is sent in any mode."""
    return any(options.get(key) for key in ("producer", "publisher", "connection"))


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
