"""Scans, one for each vendor: they let several readers at once read what ``windows`` reads."""
