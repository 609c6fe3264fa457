"""A value for the time of a block: by thread and greenlet, as these stage side by side."""

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
