"""A command whose output is read by another process."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import transaction

from outbox_app.events import NewEvent, publish_many
from tests.events.projections.declared import SoldOf, declare
from tests.events.projections.models import Sold


class Head(StringIO):
    """A pipe whose reader ends after a line."""

    def write(self, text: str) -> int:
        if "\n" in self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("writes", ["write('a line')", "write_json([0] * 9999)"])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(writes: str) -> None:
    """As head, once it has its lines."""
    code = """
import django

django.setup()

from outbox_app.management.base import OutboxCommand

class Command(OutboxCommand):
    requires_system_checks = []

    def handle(self, **options):
        self.{writes}

Command().run_from_argv(["manage.py", "tell"])
"""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-c", code.replace("{writes}", writes)],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("new_log")
def test_a_rebuild_whose_last_line_is_not_read_has_not_failed(alias: str) -> None:
    """It was said to have failed, and the view to be unchanged, after it was replaced."""
    declare(SoldOf, "sold")
    with transaction.atomic(using=alias):
        publish_many([NewEvent("order-1", "made", {"article": 7})])
    Sold.objects.using(alias).create(article=77)
    with pytest.raises(SystemExit) as ended:
        call_command("outbox_rebuild", "sold", stdout=Head())
    assert ended.value.code == 141
    assert list(Sold.objects.using(alias).values_list("article", "count")) == [(7, 1)]
