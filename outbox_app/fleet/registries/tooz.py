"""A registry in Redis, ZooKeeper or another backend of tooz, if services share no database.

A service is a group of tooz. A process is a member of it, with a coordinator of its own. Processes
poll for changes. Needs the extra ``coordination``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from typing import Any
from uuid import UUID, uuid4

from ...conf import BEATS, outbox_settings
from ...process.waiting import PollWaiter, StopFlag
from ...text import get_logger
from ..conf import fleet_settings
from ..registry import Member, Registry

try:
    from tooz import ToozError, coordination
except ImportError as error:
    raise ImportError("tooz is missing: pip install 'outbox-app[coordination]'") from error

logger = get_logger("outbox_app.fleet")


class ToozRegistry(Registry):
    """The groups of tooz at ``OUTBOX["FLEET"]["REGISTRY_URL"]``."""

    def __init__(self) -> None:
        #: The coordinator of each member, by its id. The one with the id ``_looks`` only reads.
        self._coordinators: dict[UUID, Any] = {}
        self._looks = uuid4()

    def register(self, member: Member) -> None:
        group = _group(member.service)
        coordinator = self._coordinator(member.id, member.lease_seconds)
        try:
            with suppress(coordination.GroupAlreadyExist):
                _answer(coordinator.create_group(group))
            _answer(coordinator.join_group(group, asdict(member) | {"id": str(member.id)}))
        except Exception:
            self._stop(member.id)
            raise

    def beat(self, member: Member) -> Member | None:
        if member.id not in self._coordinators:
            return None
        coordinator = self._coordinators[member.id]
        with suppress(coordination.GroupNotCreated):  # the backend has lost the groups
            # Ask for the members first: without ZooKeeper this times out, but a heartbeat hangs.
            found = _answer(coordinator.get_members(_group(member.service)))
            if str(member.id).encode() in found:
                coordinator.heartbeat()
                return member
        self._stop(member.id)
        return None

    def leave(self, member: Member) -> None:
        if member.id in self._coordinators:
            with suppress(coordination.MemberNotJoined, coordination.GroupNotCreated):
                _answer(self._coordinators[member.id].leave_group(_group(member.service)))
            self._stop(member.id)

    def members(self, service: str) -> list[Member]:
        group = _group(service)
        looks = self._coordinator(self._looks, outbox_settings().LEASE_SECONDS)
        found = []
        try:
            ids = _answer(looks.get_members(group))
        except coordination.GroupNotCreated:
            return []
        for id in ids:
            with suppress(coordination.MemberNotJoined):  # it has left meanwhile
                capabilities = _answer(looks.get_member_capabilities(group, id))
                try:
                    found.append(_member(capabilities))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    logger.warning("Invalid member left out group=%s error=%s", group, error)
        return found

    @contextmanager
    def session(self, stop: StopFlag) -> Iterator[PollWaiter]:
        try:
            yield PollWaiter(stop)
        finally:
            for id in list(self._coordinators):
                self._stop(id)

    def _coordinator(self, id: UUID, seconds: float) -> Any:
        if id not in self._coordinators:
            url = fleet_settings().REGISTRY_URL
            whole = str(max(1, int(seconds)))
            coordinator = coordination.get_coordinator(
                url,
                str(id).encode(),
                executor="synchronous",
                timeout=whole,
                # Only Redis knows fractions of a second.
                membership_timeout=str(seconds) if url.startswith("redis") else whole,
            )
            coordinator.start()
            self._coordinators[id] = coordinator
        return self._coordinators[id]

    def _stop(self, id: UUID) -> None:
        with suppress(ToozError):
            self._coordinators.pop(id).stop()


def _answer(asked: Any) -> Any:
    """Return the result of a request. Without a timeout this would wait until ZooKeeper is back."""
    return asked.get(timeout=outbox_settings().LEASE_SECONDS / BEATS)


def _member(capabilities: Any) -> Member:
    """Return a member from its capabilities. Those of a newer release may have more fields."""
    known = {
        each.name: capabilities[each.name] for each in fields(Member) if each.name in capabilities
    }
    member = Member(**known | {"id": UUID(capabilities["id"])})
    has_weight = type(member.weight) is int and 0 <= member.weight <= 100
    if not has_weight or not isinstance(member.address, str):
        raise ValueError(f"weight {member.weight!r}, address {member.address!r:.100}")
    return member


def _group(service: str) -> bytes:
    return f"outbox-{service}".encode()
