"""Unique 64-bit ids without asking the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .generator import IdParts as IdParts
    from .generator import SnowflakeField as SnowflakeField
    from .generator import parts_of as parts_of
    from .generator import shard_of as shard_of
    from .generator import snowflake as snowflake
    from .generator import snowflakes as snowflakes
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".generator": [
                *("IdParts", "SnowflakeField", "parts_of", "shard_of", "snowflake", "snowflakes"),
            ]
        },
    )
