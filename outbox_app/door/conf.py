"""The keys of ``OUTBOX`` for the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conf import Rule, read


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """They have the defaults that the documentation names."""

    #: The services that prepare events here, or that keep events of this one, over HTTP: by name,
    #: the fields of ``Peer``.
    PEERS: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={
            "rule": Rule(lambda v: isinstance(v, dict), "a dictionary of peers by their names")
        },
    )


def door_settings() -> DoorSettings:
    """Return the settings of the door."""
    return read(DoorSettings)
