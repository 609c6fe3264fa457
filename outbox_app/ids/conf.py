"""The keys of ``OUTBOX`` for ids."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..conf import Rule, read

#: The number of datacentres in an id, and of nodes in each datacentre.
DATACENTRES, NODES = 8, 32
DATACENTRE = Rule(
    lambda value: value is None or (type(value) is int and 0 <= value < DATACENTRES),
    f"an integer from 0 to {DATACENTRES - 1}, or None",
)


@dataclass(frozen=True, slots=True)
class IdSettings:
    """They have the defaults that the documentation names."""

    #: Number of the datacentre, 0 to 7: ids are made with its 32 nodes. None: with any of all 256.
    DATACENTRE: int | None = field(default=None, metadata={"rule": DATACENTRE})


def id_settings() -> IdSettings:
    """Return the settings of ids."""
    return read(IdSettings)
