"""Comparing rows of a log with its archive.

The pipeline reads archives, and is in a layer above events. So the app names its class when Django
is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from django.utils.module_loading import import_string

from ..capability import require_app

if TYPE_CHECKING:
    from .models import EventLog

_lookup = ""


class Lookup(Protocol):
    """Compares rows with an archive. Callers ask for rows in the order of their positions."""

    #: The archive's columns that are not compared, in words: the log has none like them.
    left_out: Sequence[str]

    def first(self, ids: Sequence[int], *, lock: bool) -> tuple[int, str]:
        """Return how many rows the archive holds as they are, up to one that it does not hold.

        Also return what is wrong with that one; empty if the log has it no more. ``lock`` locks the
        rows until the end of the transaction.
        """


def provide_archives(path: str) -> None:
    """Set the dotted path of the class of lookups. It is imported when it is used."""
    global _lookup
    _lookup = path


def open_archive(folder: str, log: type[EventLog], *, using: str) -> Lookup:
    """Return a lookup in the archive of a log, for the rows on a database alias.

    Raises:
        ArchiveRefused: This is no archive of the log.
        NoSpark: Packages that read an archive are not installed.
        Unreachable: The archive cannot be read.
        ImproperlyConfigured: The app of the pipeline is not installed.
    """
    require_app("outbox_app.pipeline")
    found: Any = import_string(_lookup)(folder, log, using=using)
    return found  # type: ignore[no-any-return]
