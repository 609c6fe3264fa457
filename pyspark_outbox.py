"""For Spark, which looks for data sources in modules named ``pyspark_…``: ``format("outbox")``."""

from outbox_app.pipeline.source import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
