"""``outbox_pipeline`` says in a terminal what it does until Spark has started."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from outbox_app.pipeline.exceptions import NoSpark
from outbox_app.pipeline.management.commands import outbox_pipeline

SAID = "Starting Spark: it may take a minute.\n"


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "running", "said"),
    [(Terminal(), False, SAID), (Terminal(), True, ""), (StringIO(), False, "")],
    ids=["terminal", "Spark runs already", "cron"],
)
def test_a_terminal_is_told(
    monkeypatch: pytest.MonkeyPatch, stderr: StringIO, running: bool, said: str
) -> None:
    def pipeline(**arguments: Any) -> None:
        raise NoSpark("not here")

    monkeypatch.setattr(outbox_pipeline, "pipeline", pipeline)
    monkeypatch.setattr(outbox_pipeline, "is_running", lambda: running)
    with pytest.raises(CommandError, match="not here"):
        call_command("outbox_pipeline", "audit", stderr=stderr, skip_checks=True)
    assert stderr.getvalue() == said
