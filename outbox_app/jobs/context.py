"""Set a context variable for the duration of a block.

Threads and greenlets stage side by side: a value that one of them sets is invisible to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def let(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable to a value until the block ends."""
    # In one step, which is no call: after a call, the handler of a signal may raise.
    [token] = map(variable.set, [value])
    try:
        yield
    except GeneratorExit:
        # Abandoned: a signal raised where no ``with`` sees it. The block around it may have ended,
        # or this is another context.
        if variable.get() is value:
            variable.reset(token)
        raise
    except BaseException:
        variable.reset(token)
        raise
    variable.reset(token)


def in_own_context(function: Callable[P, R]) -> Callable[P, R]:
    """Let what a function sets end with it, even if a signal raises where no ``with`` sees it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return copy_context().run(function, *args, **kwargs)

    return run
