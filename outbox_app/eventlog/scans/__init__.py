"""Spans, one a database vendor: what ``windows`` reads page by page, for readers side by side."""
