"""Servers that are listed in the settings.

Each is there as long as it is listed; one that does not answer is ejected by those who call it.
"""

from __future__ import annotations

from uuid import NAMESPACE_URL, uuid5

from ...conf import fleet_settings
from ..registry import Member, Registry


class StaticRegistry(Registry):
    """The list ``OUTBOX["FLEET"]["SERVERS"]``. Who registers changes nothing."""

    def register(self, member: Member) -> None:
        """Nothing to do: it is listed, or not."""

    def beat(self, member: Member) -> bool:
        return True

    def leave(self, member: Member) -> None:
        """Nothing to do: it stays listed."""

    def members(self, service: str) -> list[Member]:
        listed = fleet_settings().SERVERS.get(service, ())
        return [
            Member(id=uuid5(NAMESPACE_URL, a), service=service, address=a, node=a, version="")
            for a in listed
        ]
