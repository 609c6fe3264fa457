"""Errors of prepared events.

::

    PreparedError
    ├── KeeperUnavailable, FencedOut, UnknownPrepared, Contradiction
    └── PrepareRefused: InvalidPrepared, PreparedConflict
"""

from __future__ import annotations

from ..exceptions import OutboxError


class PreparedError(OutboxError):
    """A prepared event is not in the state that the call expects. The message says which it is."""


class PrepareRefused(PreparedError):
    """The event was not recorded. Do not begin the transaction that it depends on."""


class InvalidPrepared(PrepareRefused, ValueError):
    """A field of the event, or of the request to prepare it, is invalid."""


class PreparedConflict(PrepareRefused):
    """The event id belongs to an event with different content, or to an event already decided."""


class KeeperUnavailable(PreparedError):
    """The keeper gave no answer. If a confirm or cancel was lost, a check-back makes up for it."""


class FencedOut(PreparedError):
    """The fence contradicts the call: the transaction cannot commit, or has not committed."""


class UnknownPrepared(PreparedError, LookupError):
    """The keeper has no such event of this sender."""


class Contradiction(PreparedError):
    """The event was decided differently before. An incident records the contradiction."""
