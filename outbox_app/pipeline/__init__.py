"""Reads the event log at scale, on Spark: by the same exact cursor, in many processes at once.

Spark's executors import this package, so nothing here imports Django. ``pipeline.driver`` has the
part that commands use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .archive_reader import read as read
    from .archiver import Archiver as Archiver
    from .driver.pipeline import Pipeline as Pipeline
    from .driver.pipeline import pipeline as pipeline
    from .session import spark_session as spark_session
    from .source import register as register
    from .table import Archive as Archive

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".archive_reader": ["read"],
            ".archiver": ["Archiver"],
            ".driver.pipeline": ["Pipeline", "pipeline"],
            ".session": ["spark_session"],
            ".source": ["register"],
            ".table": ["Archive"],
        },
    )
