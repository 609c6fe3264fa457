"""Untrusted text, made safe for terminals, logs, pages and databases.

Task names, streams, types and reasons may contain text from the project's own users. Unprintable
characters (line breaks, terminal codes, direction marks, lone surrogates) are shown as escapes.
Templates escape HTML; this module does not. A logger of ``get_logger`` escapes each record before a
handler gets it, and makes each ``key=%s`` an attribute, for JSON formatters and structlog. An error
is shown with its type and message, and without passwords.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Callable
from functools import lru_cache
from itertools import chain, repeat
from numbers import Number
from typing import Any

#: A function that writes a line for people.
Write = Callable[[str], Any]
#: The most characters that ``shown`` returns by default.
LIMIT = 10_000


def escaped(text: object, *, but: str = "") -> str:
    r"""Return the text with each unprintable character as an escape: ``\n``, ``\x1b``.

    The result is one line that every Unicode encoding can encode. Characters in ``but`` are kept.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(
        each if each.isprintable() or each in but else each.encode("unicode_escape").decode()
        for each in plain
    )


def shown(text: object, limit: int = LIMIT, *, but: str = "\n\t") -> str:
    """Return the text escaped, except its line breaks and tabs, and cut to ``limit`` with an …."""
    plain = str(text)
    return escaped(plain[:limit], but=but) + "…" * (len(plain) > limit)


def one_line(text: object, limit: int) -> str:
    """Return the text as ``shown`` does, on one line."""
    plain = str(text).strip()
    line = re.sub(r"[ \n\t]+", " ", plain[: 2 * limit]).rstrip()
    return shown(line if len(plain) <= 2 * limit else f"{line}…", limit)


def duration(seconds: float, *, fine: bool = False) -> str:
    """Return a duration for people: ``4 s``, ``12 min``, ``3 h 5 min``, ``2 d 1 h``.

    Two units at most, rounded down. With ``fine`` less than ten seconds is in milliseconds.
    """
    if fine and seconds < 10:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{int(seconds)} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if not hours:
        return f"{minutes} min"
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min"


def storable(text: str) -> str:
    """Return a text that every database can store: no NUL, no lone surrogate."""
    return text.replace("\x00", "\\x00").encode(errors="backslashreplace").decode()


def without_passwords(text: str) -> str:
    """Return a text with the passwords of its addresses hidden: ``s3://key:**@bucket``."""
    return re.sub(r"(://[^\s/@:\['\"]*:)(?!\d+[/?#])(?:[^\s'\":]|:(?!//)){0,4000}@", r"\1**@", text)


def error_text(error: BaseException) -> str:
    """Return type, message and notes of an error, as every database can store them.

    Passwords of addresses in it are hidden.
    """
    try:
        text = str(error)
    except Exception as other:  # its own __str__ has failed
        text = f"its text cannot be had ({type(other).__name__})"
    notes = getattr(error, "__notes__", [])
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    text = "\n".join([line, *notes])[:10_000]
    return without_passwords(storable(text))[:10_000]


def per_second(count: int, seconds: float) -> float:
    """Return a rate, rounded to its significant digits: 4200, 12, 0.08."""
    rate = count / (seconds or 1)
    return round(rate) if rate >= 10 else float(f"{rate:.2g}")


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name, whose records are escaped before any handler gets them."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)  # has no effect if the logger has the filter already
    return logger


def _escape(record: logging.LogRecord) -> bool:
    # The message is not merged with its arguments, as error trackers group records by message.
    record.msg = escaped(record.msg)
    if isinstance(record.args, tuple):
        values = zip(record.args, chain(_places(record.msg), repeat(("", ""))), strict=False)
        record.args = tuple(_argument(value, *place, record) for value, place in values)
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        # Formatters use exc_text. It is indented, so that no line of it can pass for a log line.
        text = logging.Formatter().formatException(record.exc_info)
        record.exc_text = textwrap.indent(escaped(text, but="\n\t"), "  ")
    return True


@lru_cache
def _places(message: str) -> list[tuple[str, str]]:
    """Return name and conversion of each placeholder in the message: ``jobs=%d``, ``%s``."""
    found = re.finditer(r"(?:(\w+)=)?%[-#0 +]*[\d.]*([a-z%])", message)
    return [(place[1], place[2]) for place in found if place[2] != "%"]


def _argument(value: object, name: str, conversion: str, record: logging.LogRecord) -> Any:
    """Return a value as the line shows it. A named value becomes an attribute of the record."""
    plain: Any = value
    if value is not None and not isinstance(value, Number):
        try:
            shown = error_text(value) if isinstance(value, BaseException) else value
            plain = escaped(repr(shown) if conversion == "r" else shown)
        except Exception as error:  # the value's own __str__ or __repr__ failed
            plain = f"its text cannot be had ({type(error).__name__})"
    if name:
        record.__dict__.setdefault(name, plain)
    if not isinstance(plain, str):
        return plain
    is_quoted = name and (not plain or re.search(r'[\s"=]', plain))
    return _Shown('"{}"'.format(plain.replace('"', '\\"')) if is_quoted else plain)


class _Shown(str):
    """Text that a log line shows as it is, even with ``%r``."""

    __repr__ = str.__str__
