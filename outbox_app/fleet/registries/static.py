"""A registry of servers that are listed in the settings.

A server is a member as long as it is listed. If it does not answer, its callers eject it.
"""

from __future__ import annotations

from uuid import NAMESPACE_URL, uuid5

from ..conf import fleet_settings
from ..registry import Member, Registry


class StaticRegistry(Registry):
    """The list ``OUTBOX["FLEET"]["SERVERS"]``. Registering changes nothing."""

    def register(self, member: Member) -> None:
        """Nothing to do: the process is listed, or it is not."""

    def beat(self, member: Member) -> Member:
        return member

    def leave(self, member: Member) -> None:
        """Nothing to do: the process stays listed."""

    def members(self, service: str) -> list[Member]:
        listed = fleet_settings().SERVERS.get(service, ())
        return [
            Member(id=uuid5(NAMESPACE_URL, a), service=service, address=a, node=a, version="")
            for a in listed
        ]
