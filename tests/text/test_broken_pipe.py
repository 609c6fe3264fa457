"""A command whose output is read by another process."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    """As head, once it has its lines."""
    code = """
import django

django.setup()

from outbox_app.management.teaching import TeachingCommand

class Command(TeachingCommand):
    requires_system_checks = []

    def handle(self, **options):
        self.write("a line")

Command().run_from_argv(["manage.py", "tell"])
"""
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
