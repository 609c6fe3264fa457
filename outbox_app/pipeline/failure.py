"""What went wrong in Spark, in one line: a task's own error is found at the end of many traces.

Of an error that no task has raised the first line is taken. Traces are Spark's business: its log
has them.
"""

from __future__ import annotations

import re

#: The last line of a Python trace: a class of ours, or of others, and its message.
_RAISED = [
    re.compile(r"^outbox_app\.(?:\w+\.)+(\w+): (.+)$", re.MULTILINE),
    re.compile(r"^(?!py4j)(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", re.MULTILINE),
    # What Spark itself has met, as py4j writes it.
    re.compile(r"^: (?:\w+\.)+(\w+): (.+)$", re.MULTILINE),
]


def reason(error: BaseException) -> str:
    """Return what a task or Spark itself has raised, as one line.

    Args:
        error: What came out of Spark.
    """
    text = str(error)
    for pattern in _RAISED:
        if raised := pattern.search(text):
            return f"{raised[1]}: {raised[2]}"
    line = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
