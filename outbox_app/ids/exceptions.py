"""Errors of ids."""

from __future__ import annotations

from ..exceptions import OutboxError


class NoNode(OutboxError):
    """No id can be made: every node is taken, or the database that reserves time is unreachable."""
