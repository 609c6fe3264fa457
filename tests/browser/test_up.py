"""``make up`` has something to look at in the admin from its first start on, and once only.

Also after ``make demo``, which leaves the incident of the drainer that it killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import data
from .project import Project

#: What there is of each model: columns, and the rows.
TROUBLE = {
    "outbox_app.DeadJob": (("task",), ["example_project.shop.tasks.send_receipt"] * 3),
    "outbox_app.StagedJob": (("task",), ["example_project.shop.tasks.reorder"]),
    "outbox_app.Incident": (("kind",), ["takeover", "takeover"]),
    "outbox_events.Gap": (("state", "stream"), [("open", "basket-7")]),
    "outbox_events.ParkedStream": (("stream",), ["basket-7"]),
    "outbox_prepared.PreparedEvent": (("state",), ["undecided"]),
}


@pytest.mark.system
@pytest.mark.timeout(400)
def test_there_is_trouble_to_look_at(tmp_path: Path) -> None:
    for start in range(2):
        project = Project(tmp_path)
        try:
            if start == 0:
                project.ask(data.take_over)
            project.start()
            project.ask(data.wait_for, "shop.Receipt")  # the other orders are on their way
            held = {"available_at__isnull": False, "sent_at": None}
            found = {
                model: project.ask(data.rows, model, *columns, **held)
                if model == "outbox_app.StagedJob"
                else project.ask(data.rows, model, *columns)
                for model, (columns, _rows) in TROUBLE.items()
            }
        finally:
            project.stop()
        assert found == {model: rows for model, (_columns, rows) in TROUBLE.items()}
