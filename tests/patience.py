"""How long tests wait for what other threads and processes do: longer on a busy machine.

A limit in seconds holds for an idle machine, on which nothing comes near it. It is stretched by the
load, that of pytest-timeout as well
(see ``tests.workers``). What is there in time is not waited for any longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: More than anything takes on an idle machine.
SECONDS = 40.0


def patience(seconds: float = SECONDS) -> float:
    """Seconds that are as long here and now as ``seconds`` are on an idle machine."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(max(load, 1.0), 10.0)


def eventually(condition: Callable[[], Any], what: str = "", seconds: float = SECONDS) -> Any:
    """Return what ``condition`` gives as soon as that is true."""
    begin = time.monotonic()
    while not (result := condition()):
        waited = time.monotonic() - begin
        assert waited < patience(seconds), f"never happened: {what or condition}"
        # A look takes time of those who are waited for: after a while there are fewer.
        time.sleep(min(max(waited / 20, 0.02), 0.1))
    return result
