"""The event log at scale, on Spark: the same exact cursor, read by many processes at once.

Nothing here imports Django: Spark's executors import it. What a command does around it is in
``pipeline.driver``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .archiver import Archiver as Archiver
    from .driver.pipeline import Pipeline as Pipeline
    from .driver.pipeline import pipeline as pipeline
    from .manifest import Manifest as Manifest
    from .parquet import read_checked as read_checked
    from .session import spark_session as spark_session
    from .source import register as register
    from .store import Store as Store

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Archiver": "outbox_app.pipeline.archiver",
        "Manifest": "outbox_app.pipeline.manifest",
        "Pipeline": "outbox_app.pipeline.driver.pipeline",
        "Store": "outbox_app.pipeline.store",
        "pipeline": "outbox_app.pipeline.driver.pipeline",
        "read_checked": "outbox_app.pipeline.parquet",
        "register": "outbox_app.pipeline.source",
        "spark_session": "outbox_app.pipeline.session",
    },
)
