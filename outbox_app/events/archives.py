"""Looking up rows of a log in its archive.

The pipeline reads archives, and is in a layer above events. So the app names its class when Django
is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from django.utils.module_loading import import_string

from ..capability import require_app

_lookup = ""


class Lookup(Protocol):
    """Looks up rows in an archive. Callers ask for rows in the order of their positions."""

    def first(self, rows: Sequence[tuple[int, object]]) -> int:
        """Return how many rows (position, message id) are archived, up to one that is not."""


def provide_archives(path: str) -> None:
    """Set the dotted path of the class of lookups. It is imported when it is used."""
    global _lookup
    _lookup = path


def open_archive(folder: str, log: str) -> Lookup:
    """Return a lookup in the archive of a log (its table).

    Raises:
        ArchiveRefused: This is no archive of the log.
        NoSpark: Packages that read an archive are not installed.
        Unreachable: The archive cannot be read.
        ImproperlyConfigured: The app of the pipeline is not installed.
    """
    require_app("outbox_app.pipeline")
    found: Any = import_string(_lookup)(folder, log)
    return found  # type: ignore[no-any-return]
