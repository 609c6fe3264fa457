"""Named points at which tests stop or kill a process. Without tests they do nothing.

The environment of a process sets an action: ``OUTBOX_FAILPOINT=published_not_deleted=kill@3`` kills
it when it passes that point for the third time; ``stop`` sends SIGSTOP, ``exit`` raises SystemExit.
Inside a process, ``set_failpoint`` sets a callable.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_actions: dict[str, Callable[[], None]] = {}


def failpoint(name: str) -> None:
    """Run the action that a test has set for this point, if any."""
    if action := _actions.get(name):
        action()


def set_failpoint(name: str, action: Callable[[], None] | None) -> None:
    """Call ``action`` whenever the point is passed; None removes it."""
    if action is None:
        _actions.pop(name, None)
    else:
        _actions[name] = action


def _from_environment(spec: str) -> None:
    name, _, action = spec.partition("=")
    action, _, nth = action.partition("@")
    left = int(nth or 1)

    def act() -> None:
        nonlocal left
        left -= 1
        if left:
            return
        if action == "exit":
            raise SystemExit(99)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])

    set_failpoint(name, act)


if "OUTBOX_FAILPOINT" in os.environ:
    _from_environment(os.environ["OUTBOX_FAILPOINT"])
