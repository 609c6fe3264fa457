"""Characters that a database cannot store: PostgreSQL may be in LATIN1, or in SQL_ASCII.

It refuses such a character with an error that breaks the caller's transaction, so texts are checked
before any statement. SQL_ASCII stores the bytes of any text, but converts and counts none of them,
and refuses JSON with other characters than ASCII.
"""

from __future__ import annotations

import codecs
import re
from functools import cache
from typing import Any

from django.db import connections

#: Names of PostgreSQL that Python's codecs do not know.
_NAMES = (("^SQL_ASCII$", "ascii"), ("^WIN", "cp"), ("^KOI8", "koi8_"))


def encoding_of(using: str) -> str:
    """Return the name of a database's encoding on PostgreSQL, if it is not UTF8; else empty."""
    connection: Any = connections[using]
    if connection.vendor != "postgresql":
        return ""
    connection.ensure_connection()
    driver = connection.connection
    info = getattr(driver, "info", None)
    ask = getattr(info, "parameter_status", None) or driver.get_parameter_status
    name = ask("server_encoding")
    if isinstance(name, bytes):
        name = name.decode()
    return "" if name in (None, "UTF8") else str(name)


def unstorable(text: str, *, using: str) -> str:
    """Return what an error says about the first character that cannot be stored; empty if none."""
    if text.isascii() or not (name := encoding_of(using)):
        return ""
    try:
        text.encode(_codec(name))
    except UnicodeEncodeError as error:
        return (
            f"holds {text[error.start]!r}, which database {using!r} cannot store: its encoding is "
            f"{name}. Remove the character, or move the data to a database in UTF8."
        )
    return ""


def replaced(text: str, *, using: str) -> str:
    """Return a text with escapes for the characters that the database cannot store."""
    if text.isascii() or not (name := encoding_of(using)):
        return text
    codec = _codec(name)
    return text.encode(codec, "backslashreplace").decode(codec)


@cache
def _codec(name: str) -> str:
    for pattern, by in _NAMES:
        name = re.sub(pattern, by, name)
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "ascii"  # what every encoding of PostgreSQL can store
