"""Task bodies for tests: ``app.task(name="add")(tasks.add)``."""

from __future__ import annotations


def add(x, y):
    return x + y


def note(key, i):
    return None
