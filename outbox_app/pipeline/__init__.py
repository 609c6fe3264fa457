"""The event log at scale, on Spark: the same exact cursor, read by many processes at once.

Nothing here imports Django: Spark's executors import it. What a command does around it is in
``operations``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from ..operations.pipeline import Pipeline as Pipeline
    from ..operations.pipeline import pipeline as pipeline
    from ..pipeline.archive import Archiver as Archiver
    from ..pipeline.manifest import Manifest as Manifest
    from ..pipeline.parquet import read_checked as read_checked
    from ..pipeline.session import spark_session as spark_session
    from ..pipeline.source import register as register
    from ..pipeline.store import Store as Store

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Archiver": "outbox_app.pipeline.archive",
        "Manifest": "outbox_app.pipeline.manifest",
        "Pipeline": "outbox_app.operations.pipeline",
        "Store": "outbox_app.pipeline.store",
        "pipeline": "outbox_app.operations.pipeline",
        "read_checked": "outbox_app.pipeline.parquet",
        "register": "outbox_app.pipeline.source",
        "spark_session": "outbox_app.pipeline.session",
    },
)
