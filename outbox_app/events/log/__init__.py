"""The event log: the only place that reasons about order, ids, visibility and gaps."""
