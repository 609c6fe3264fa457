"""Peers: the services that call this one over HTTP, or that this one calls, and their valid keys.

They are registered in the setting ``PEERS``: only their addresses are called, and only their keys
are accepted. A key is found by its id. If two peers have a key with the same id, neither key is
accepted. A secret is read by its reference at each use, so replacing its file rotates the key.
Needs no extra.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from django.db import connections
from django.utils import timezone

from ..capability import require_app
from .conf import door_settings
from .exceptions import InvalidPeer

require_app("outbox_app.door")

#: What a peer does: it prepares events and executes commands here; it keeps ours; or both.
SENDER, KEEPER, BOTH = DIRECTIONS = "sender", "keeper", "both"
#: The algorithm of each field of a key, the fields that sign, and the fields that verify.
ALGORITHMS = {"public": "ed25519", "private": "ed25519", "secret": "hmac-sha256"}
SIGNS, VERIFIES = ("private", "secret"), ("public", "secret")
#: The scheme of an address that names a service: "service:shop".
SERVICE = "service"
#: The largest request: how many events, commands and bytes. A peer's own limits may be lower.
LIMITS = {"events": 500, "commands": 1000, "bytes": 4 * 1024 * 1024}
#: The shortest secret: a shorter one would weaken HMAC-SHA256 (RFC 2104, section 3).
SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A service that prepares events here, that keeps our prepared events, or both."""

    #: A name has no colon, because a colon marks a sender that is a database alias.
    name: str = ""
    direction: str = ""
    #: The URL of the peer's door, to which "prepared/" or "check" is appended.
    address: str = ""
    #: The alias of the database with the fences of the events that the peer keeps.
    database: str = "default"
    #: A key has an "id", one of "public", "private" and "secret", and is valid "from" and "until".
    #: It names an environment variable or a file, and holds no secret.
    keys: Sequence[Mapping[str, Any]] = ()
    #: Patterns for what the peer may prepare: event types, their topics, and tasks of jobs.
    types: Sequence[str] = ()
    topics: Sequence[str] = ()
    jobs: Sequence[str] = ()
    #: Patterns for the commands that the peer may execute, such as "bank.account.withdraw".
    commands: Sequence[str] = ()
    #: The limits of one request: "events", "commands" and "bytes".
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


#: The fields of a peer in the setting, where its name is the key.
FIELDS = [each.name for each in dataclasses.fields(Peer) if each.name != "name"]


class Key(NamedTuple):
    id: str
    algorithm: str
    #: "env:NAME", "file:PATH", or a public key as PEM.
    reference: str

    def read(self) -> bytes:
        """Return the secret, or the PEM text of the key. Raises ``InvalidPeer``."""
        kind, _, name = self.reference.partition(":")
        try:
            if kind == "env":
                value = os.environ[name].encode()
            else:
                value = Path(name).read_bytes() if kind == "file" else self.reference.encode()
        except (KeyError, OSError) as error:
            raise InvalidPeer(f"The key {self.id!r} cannot be read: {error!r}.") from error
        value = value.strip()
        if self.algorithm == "hmac-sha256" and len(value) < SECRET_BYTES:
            raise InvalidPeer(f"The secret {self.id!r} has fewer than {SECRET_BYTES} bytes.")
        return value


def peer_named(name: str, direction: str) -> Peer:
    """Return a registered peer. Raises ``InvalidPeer``."""
    peers = _peers(direction)
    if name in peers:
        return peers[name]
    known = ", ".join(map(repr, peers)) or "none"
    raise InvalidPeer(
        f"There is no {direction} {name!r} among the peers. Known: {known}. Register it in "
        'OUTBOX["PEERS"].'
    )


def peer_of_key(id: Any, direction: str) -> tuple[Peer, Key] | None:
    """Return the peer and its valid key with this id, or None unless exactly one peer has it."""
    pairs = [(p, key) for p in _peers(direction).values() for key in valid_keys(p, VERIFIES)]
    found = [pair for pair in pairs if pair[1].id == id]
    return found[0] if len(found) == 1 else None


def _peers(direction: str) -> dict[str, Peer]:
    registered = door_settings().PEERS.items()
    fitting = {
        name: each for name, each in registered if each.get("direction") in (direction, BOTH)
    }
    return {name: Peer(name=name, **each) for name, each in fitting.items()}


def base_url(peer: Peer, address: str | None = None) -> str:
    """Return the base URL of a peer, or of one of its servers. Raises ``InvalidPeer``."""
    address = peer.address if address is None else address
    if fault := address_fault(address):
        raise InvalidPeer(f"The address of the peer {peer.name!r} {fault}.")
    return address.rstrip("/") + "/"


def service_of(peer: Peer) -> str:
    """Return the service that a peer has as its address in place of a URL, or an empty string."""
    kind, _, name = str(peer.address).partition(":")
    return name if kind == SERVICE and is_name(name) else ""


def is_name(name: Any) -> bool:
    """Return whether this is a valid name of a peer or a service."""
    return isinstance(name, str) and 0 < len(name) <= 80 and not set(":/ \t\r\n") & set(name)


def valid_keys(peer: Peer, kinds: Sequence[str]) -> Iterator[Key]:
    """Yield the keys of these kinds that are valid now, in the order of the peer's list."""
    now = datetime.now(UTC)
    for key in peer.keys if isinstance(peer.keys, list | tuple) else ():
        if key_faults(key):
            continue
        begin, end = key.get("from"), key.get("until")
        if (begin is None or moment(begin) <= now) and (end is None or now < moment(end)):
            for kind in kinds:
                if kind in key:
                    yield Key(key["id"], ALGORITHMS[kind], key[kind])


def signing_key(peer: Peer) -> Key:
    """Return the key that signs messages to a peer: the first one that is valid now."""
    for key in valid_keys(peer, SIGNS):
        return key
    raise InvalidPeer(f"No key that signs for the peer {peer.name!r} is valid now.")


def limit(peer: Peer, name: str) -> int:
    return min(LIMITS[name], int(peer.limits.get(name, LIMITS[name])))


def is_granted(peer: Peer, *, type: str, topic: str, job: str) -> bool:
    """Return whether a peer may prepare such an event or job. An empty topic needs no grant."""
    if job:
        return _fits(job, peer.jobs)
    return _fits(type, peer.types) and (not topic or _fits(topic, peer.topics))


def may_execute(peer: Peer, command: str) -> bool:
    """Return whether a peer may execute a command, such as "bank.account.withdraw"."""
    return _fits(command, peer.commands)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return isinstance(patterns, list | tuple) and any(fnmatchcase(name, p) for p in patterns)


def peer_faults(name: Any, settings: Any) -> list[str]:
    """Return the faults of a peer's registration, as predicates that follow its name."""
    if not is_name(name):
        return ["needs a name of up to 80 characters without colon, slash and space"]
    if not isinstance(settings, Mapping):
        return ["is not a dictionary"]
    if unknown := sorted(set(map(str, settings)) - set(FIELDS)):
        return [f"has no field {', '.join(map(repr, unknown))}; there are {', '.join(FIELDS)}"]
    faults = []
    if settings.get("direction") not in DIRECTIONS:
        faults.append(f"needs one of the directions {', '.join(map(repr, DIRECTIONS))}")
    address = settings.get("address")
    if (fault := address_fault(address)) and not service_of(Peer(address=str(address))):
        faults.append(f"has an address that {fault}")
    if settings.get("database", "default") not in connections:
        faults.append("has a database that is not an alias of DATABASES")
    for field in ("types", "topics", "jobs", "commands"):
        patterns = settings.get(field, [])
        if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
            faults.append(f"has {field} that are not a list of patterns")
    limits = settings.get("limits", {})
    if not isinstance(limits, Mapping) or any(
        each not in LIMITS or type(value) is not int or value < 1 for each, value in limits.items()
    ):
        faults.append(f"has limits other than positive integers for {', '.join(LIMITS)}")
    keys = settings.get("keys")
    if not isinstance(keys, list | tuple) or not keys:
        return [*faults, "has no list of keys"]
    return faults + [f"has a key that {fault}" for key in keys for fault in key_faults(key)]


def key_faults(key: Any) -> list[str]:
    if not isinstance(key, Mapping) or not isinstance(key.get("id"), str) or not key["id"]:
        return ["has no id"]
    kinds = [kind for kind in ALGORITHMS if kind in key]
    if len(kinds) != 1 or set(key) - {"id", "from", "until", *kinds}:
        return [f"needs exactly one of {', '.join(ALGORITHMS)}, besides id, from and until"]
    value = key[kinds[0]]
    fits = isinstance(value, str) and (
        value.startswith(("env:", "file:")) or (kinds == ["public"] and value.startswith("-----"))
    )
    faults = [] if fits else [f"does not name its {kinds[0]} by reference (env:NAME or file:PATH)"]
    try:
        [moment(key[name]) for name in ("from", "until") if key.get(name) is not None]
    except ValueError:
        faults.append("has a from or until that is not a time with a time zone")
    return faults


def address_fault(address: Any) -> str:
    """Return why an address cannot be called: it must be https, or http to this machine."""
    try:
        parts = urlsplit(address) if isinstance(address, str) else None
        host = parts.hostname if parts and parts.port != 0 else ""
    except ValueError:
        parts, host = None, ""
    if not parts or not host or parts.query or parts.fragment or parts.username is not None:
        return "is not of the form https://host/path/"
    if parts.scheme == "https" or (parts.scheme == "http" and is_this_host(host)):
        return ""
    return "is not https"


def is_this_host(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def moment(value: Any) -> datetime:
    """Return a time that has a time zone, or raise ``ValueError``."""
    found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    if timezone.is_naive(found):
        raise ValueError(value)
    return found
