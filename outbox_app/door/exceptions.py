"""Errors of the door.

::

    PeerError: InvalidPeer, PeerUnavailable
"""

from __future__ import annotations

from ..exceptions import OutboxError


class PeerError(OutboxError):
    """Another service cannot be called."""


class InvalidPeer(PeerError):
    """The peer is not registered, has no key that is valid, or the extra ``door`` is missing."""

    returncode = 2


class PeerUnavailable(PeerError):
    """The peer gave no answer that can be trusted. If ``sent``, it may have received the call."""

    def __init__(self, message: str = "", *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent
