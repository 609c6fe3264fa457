"""The helpers in Django's own test cases, and as a fixture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from django.db import transaction
from django.test import TestCase, TransactionTestCase

from outbox_app import testing
from outbox_app.celery import OutboxCelery
from outbox_app.entities import testing as of_entities
from outbox_app.events import testing as of_events
from outbox_app.prepared import testing as of_prepared
from outbox_app.testing import assert_not_staged, assert_staged, drain_inline, run_staged

ROOT = Path(__file__).resolve().parents[2]


class Steps:
    """The same test for both."""

    def setUp(self):
        self.app = OutboxCelery("cases", broker="memory://", set_as_current=False)
        self.addCleanup(self.app.close)
        self.ran = []

    def test_staged_and_run(self):
        @self.app.task(shared=False)
        def append(x):
            self.ran.append(x)

        with transaction.atomic():
            append.delay(1)
            append.delay(2)
        assert_staged(append, args=[1])
        run_staged()
        assert self.ran == [1, 2]
        assert_not_staged()

    def test_drained(self):
        with transaction.atomic():
            self.app.send_task("elsewhere")
        assert drain_inline().published == 1


class InTestCase(Steps, TestCase):
    pass


class InTransactionTestCase(Steps, TransactionTestCase):
    pass


def test_fixture_has_the_helpers_of_all_apps(outbox):
    assert outbox.assert_staged is testing.assert_staged
    assert outbox.assert_published is of_events.assert_published
    assert outbox.at_once is of_entities.at_once
    assert outbox.assert_prepared is of_prepared.assert_prepared


def test_plugin_loads_no_django(tmp_path):
    """pytest loads it in every project, configured or not."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('outbox_app.pytest_plugin')\n"
        "    assert not {'django', 'celery', 'kombu'} & set(sys.modules)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("DJANGO", "PYTEST"))}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "outbox_app.pytest_plugin", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
