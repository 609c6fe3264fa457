"""Set a context variable for the duration of a block.

Threads and greenlets stage side by side: a value that one of them sets is invisible to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def let(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable to a value until the block ends."""
    # In one step, which is no call: after a call, the handler of a signal may raise.
    [token] = map(variable.set, [value])
    try:
        yield
    finally:
        variable.reset(token)
