"""A large table split into several, by id or by a key. It is no app: it has no table of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .key_index import KeyIndex as KeyIndex
    from .key_index import find_by_key as find_by_key
    from .sharded_table import ShardedTable as ShardedTable
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {".key_index": ["KeyIndex", "find_by_key"], ".sharded_table": ["ShardedTable"]},
    )
