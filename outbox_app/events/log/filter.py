"""Which rows of a log a reader wants: a condition in SQL that every database understands.

Imports no Django: Spark's executors use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EventFilter:
    #: Exact names; None: all.
    topics: Sequence[str] | None = None
    #: Exact names, or prefixes that end in ``*``; None: all.
    types: Sequence[str] | None = None
    #: Which part of the streams, or which parts: the slice modulo ``parts`` is (in) ``part``.
    parts: int = 1
    part: int | tuple[int, ...] = 0

    def sql(self) -> tuple[str, list[Any]]:
        """Return the condition (empty: all rows) and its parameters, ``%s`` each."""
        conditions: list[str] = []
        params: list[Any] = []
        chosen = (self.part,) if isinstance(self.part, int) else self.part
        if len(chosen) < self.parts:
            numbers = ", ".join(str(int(part)) for part in chosen)
            conditions.append(f"slice %% {int(self.parts)} IN ({numbers})")
        if self.topics is not None:
            conditions.append(_one_of("topic", len(self.topics)))
            params += self.topics
        if self.types is not None and "*" not in self.types:
            exact = [name for name in self.types if not name.endswith("*")]
            alternatives = [_one_of("type", len(exact))] if exact else []
            params += exact
            for prefix in (name[:-1] for name in self.types if name.endswith("*")):
                # LIKE ignores the case on SQLite; a range follows the collation on PostgreSQL.
                alternatives.append(f"substr(type, 1, {len(prefix)}) = %s")
                params.append(prefix)
            conditions.append(f"({' OR '.join(alternatives or ['1 = 0'])})")
        return " AND ".join(conditions), params

    def matches(self, topic: str, type: str) -> bool:
        """Return whether a row has a wanted topic and type. Its part is not checked."""
        if self.topics is not None and topic not in self.topics:
            return False
        return self.types is None or any(
            type.startswith(name[:-1]) if name.endswith("*") else type == name
            for name in self.types
        )


def _one_of(column: str, count: int) -> str:
    return f"{column} IN ({', '.join(['%s'] * count)})" if count else "1 = 0"
