"""Receipts: the worker deletes the row of a job, not the drainer."""
