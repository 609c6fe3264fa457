"""What hostile text may do: nothing. Text of strangers, and what is left of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import StringIO

import pytest

from outbox_app.text import escaped

#: Terminal codes, line breaks of each kind, C1 codes, text that runs backwards.
HOSTILE = "a\x1b[31m\r\nFORGED\x9b2J\x85\x0b\u2028FORGED\u202eb\x07"


def assert_harmless(written: str, *, times: int = 0) -> None:
    """Fail unless each line can be read as it is, and none was forged.

    Args:
        written: What has reached the terminal.
        times: How often the hostile text has to be in it, at least.
    """
    for line in written.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("FORGED"), line
    assert written.count(escaped(HOSTILE)) >= times, written


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """The output of the project's log handler for the package's loggers, as on a terminal."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logger = logging.getLogger("outbox_app")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)
