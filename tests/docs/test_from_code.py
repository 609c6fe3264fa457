"""Types of columns, columns of indexes and values of options in the reference are the code's."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class

from outbox_app.models import DeadJob, StagedJob
from tests.pages import REFERENCE
from tests.tables import every_model

written: Any = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs/from_code.py"))[
    "written"
]

COMMANDS = {
    name: load_command_class(app, name)
    for name, app in get_commands().items()
    if app.startswith("outbox_app")
}


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_what_the_code_says(page: Path) -> None:
    """Otherwise: ``python docs/from_code.py``."""
    text = page.read_text()
    assert written(text, every_model(), COMMANDS) == text


def test_a_type_is_the_field_s_and_its_meaning_the_page_s() -> None:
    page = (REFERENCE / "models.md").read_text()
    wrong = page.replace("| `queue` | varchar(255) |", "| `queue` | text |")
    assert wrong != page
    assert written(wrong, [StagedJob], {}) == page
    assert written(wrong, [DeadJob], {}) == wrong


def test_an_index_has_its_columns_in_their_order() -> None:
    page = (REFERENCE / "models.md").read_text()
    columns = "`app`, `shard`, `available_at`, `id`"
    wrong = page.replace(columns, "`shard`, `app`")
    assert re.search(r"`outbox_staged_ready` \| `shard`, `app` \|", wrong)
    assert written(wrong, [StagedJob], {}) == page


def test_an_option_has_the_name_of_its_value() -> None:
    page = (REFERENCE / "commands.md").read_text()
    assert "| `--max-jobs N` |" in page
    wrong = page.replace("| `--max-jobs N` |", "| `--max-jobs JOBS` |")
    assert written(wrong, [], COMMANDS) == page
    assert written(wrong, [], {}) == wrong
