"""The shop's own pipeline: sales, minute by minute, from the log and its archive.

The pipeline is a function from a data frame of events to a data frame: it does not know where the
events are stored, or how many machines read them.
"""

from pyspark.sql import functions as F


def articles_sold(events):
    """Return how many pieces of each article were ordered in each minute."""
    order = F.from_json("data", "article bigint, quantity bigint")
    return (
        events.where("type = 'order.placed'")
        .select(F.date_trunc("minute", "recorded_at").alias("minute"), order.alias("order"))
        .groupBy("minute", F.col("order.article").alias("article"))
        .agg(F.count("*").alias("orders"), F.sum("order.quantity").alias("pieces"))
        .orderBy("minute", "article")
    )
