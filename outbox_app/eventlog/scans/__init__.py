"""Scans, one for each vendor: what ``windows`` reads page by page, for several readers at once."""
