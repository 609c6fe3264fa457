"""The key ``FLEET`` of ``OUTBOX``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured

from ..conf import Rule, read


@dataclass(frozen=True, slots=True)
class FleetKey:
    #: This process as a server or a client of a service's doors: the fields of ``FleetSettings``.
    FLEET: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"rule": Rule(lambda value: isinstance(value, dict), "a dictionary")},
    )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The keys of ``OUTBOX["FLEET"]``."""

    #: The service that processes of this project belong to. Empty: they register nowhere.
    SERVICE: str = ""
    #: Address at which others call the door of this process. Empty: it is a client, never called.
    ADDRESS: str = ""
    #: Its share of the calls, relative to the weights of the other servers: 0 (drained) to 100.
    WEIGHT: int = 100
    #: Dotted path of a ``Registry``.
    REGISTRY: str = "outbox_app.fleet.registries.DatabaseRegistry"
    #: For ToozRegistry: the address of Redis, ZooKeeper, …
    REGISTRY_URL: str = ""
    #: For StaticRegistry: the servers' addresses by service.
    SERVERS: Mapping[str, Sequence[str]] = field(default_factory=dict)
    BALANCE: Literal["random", "round_robin", "weighted_random"] = "weighted_random"
    #: Whether a call tries one server only, or several one after the other.
    CLUSTER: Literal["fail_fast", "fail_over"] = "fail_over"
    #: Seconds for all attempts of a call together.
    DEADLINE: float = 5.0
    #: Which servers lead the entities of routed types: "registered" means those of SERVICE, a list
    #: names them. None: no server leads, and each command is executed where it arrives.
    TOPOLOGY: Literal["registered"] | Sequence[str] | None = "registered"


def fleet_settings() -> FleetSettings:
    """Return the values of ``OUTBOX["FLEET"]`` over the defaults."""
    try:
        return FleetSettings(**read(FleetKey).FLEET)
    except TypeError as error:
        known = ", ".join(each.name for each in fields(FleetSettings))
        raise ImproperlyConfigured(f"OUTBOX['FLEET']: {error}. Known keys: {known}.") from error
