"""What went wrong in Spark, in one line: a task's own error is found at the end of many traces."""

from __future__ import annotations

import re

#: The last line of a Python trace: a class, perhaps of a package, and its message.
_RAISED = re.compile(r"^([\w.]*(?:Error|Exception|Refused|Unreachable|Unsafe\w*|\w+Log|\w+Cursor)"
                     r"): (.+)$", re.MULTILINE)  # fmt: skip


def reason(error: BaseException) -> str:
    """Return what a task or Spark itself has raised, as one line.

    Args:
        error: What came out of Spark.
    """
    text = str(error)
    raised = [match for match in _RAISED.findall(text) if not match[0].startswith("py4j")]
    if raised:
        name, message = raised[0]
        return f"{name.rpartition('.')[2]}: {message}"
    line = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
