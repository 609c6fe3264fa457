"""Errors of the pipeline.

::

    PipelineError: NoSpark, InvalidOption, InvalidSchema, Unreachable, ArchiveRefused
"""

from __future__ import annotations

from ..events.exceptions import ArchiveError
from ..exceptions import OutboxError


class PipelineError(OutboxError):
    """A pipeline on Spark cannot run or continue. The log is unchanged."""

    returncode = 2


class NoSpark(PipelineError):
    """PySpark, pyarrow or Java is missing, or too old. The message says what to install."""


class InvalidOption(PipelineError, ValueError):
    """An option of the data source ``outbox`` is missing, unknown, or invalid."""


class InvalidSchema(PipelineError, ValueError):
    """A schema names a column that no log has, or gives it another type."""


class Unreachable(PipelineError, ArchiveError):
    """A database or an object store does not answer, or refuses. The message has no password."""


class ArchiveRefused(PipelineError, ArchiveError):
    """A folder is not an archive of this log, or is a damaged one. Nothing was written to it."""
