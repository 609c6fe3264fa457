"""The event log at scale, on Spark: the same exact cursor, read by many processes at once.

Nothing here imports Django: Spark's executors import it. What a command does around it is in
``operations``.
"""
