"""A value for the time of a block, in a context variable.

Threads and greenlets stage side by side: what holds for one of them holds for no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def let(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Let a context variable have a value until the block ends."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
