"""Results of ``django.tasks`` in the admin: only users with permission see their content."""

from __future__ import annotations

import json

import pytest
from django.urls import reverse
from django.utils.timezone import now

from outbox_app.django_tasks.models import TaskResult

from ..admin.pages import body, page, text

LIST = reverse("admin:outbox_django_tasks_taskresult_changelist")
DAMAGED = ["nonsense {", "{}", "7", '[{"trace": 1}]', '[{"traceback": ["x"]}]', "[7]"]
CALL = {"backend": "default", "args": [17], "kwargs": {"password": "hunter2"}}


@pytest.fixture
def failed(alias):
    times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "kept_from"), now())
    error = {
        "exception_class_path": "OSError",
        "traceback": "OSError: no <b>stock</b>\x1b token=hunter2",
    }
    return TaskResult.objects.using(alias).create(
        task_id="7d1ad9ba-6c4f-4d2f-9b0c-2f6cb0a6ef3e", task="shop.tasks.pack", status="FAILED",
        call=json.dumps(CALL), errors=json.dumps([error]), worker_ids=json.dumps(["w@one:1"]),
        **times,
    )  # fmt: skip


def test_the_page_shows_what_was_called_and_why_it_failed(superuser, failed):
    shown = text(superuser.get(page(failed)))
    for words in ("shop.tasks.pack", "failed", "w@one:1", "17", "OSError: no <b>stock</b>"):
        assert words in shown
    assert "hunter2" not in shown
    assert "token=••••" in shown
    assert "\x1b" not in shown


def test_without_the_permission_it_is_hidden(log_in, failed):
    shown = text(log_in("staff", permissions=["view_taskresult"]).get(page(failed)))
    assert "this needs the permission outbox_django_tasks.view_payload_taskresult" in shown
    assert "OSError" not in shown


def test_the_list(superuser, failed):
    for query in ({}, {"status": "FAILED"}, {"q": failed.task_id}):
        assert page(failed) in body(superuser.get(LIST, query))
    for query in ({"status": "READY"}, {"q": failed.task_id[:-1]}):
        assert page(failed) not in body(superuser.get(LIST, query))


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_row_that_was_edited_by_hand(superuser, failed, damaged):
    columns = dict.fromkeys(("call", "return_value", "errors", "worker_ids"), damaged)
    TaskResult.objects.using(failed._state.db).filter(pk=failed.pk).update(**columns)
    assert superuser.get(LIST).status_code == 200
    assert text(superuser.get(page(failed))).count(damaged.strip("[]{}")[:8]) >= 1


def test_a_large_call_is_cut_before_it_is_parsed(superuser, failed):
    """A call may have 16 MiB of JSON: to parse and indent that would take most of a minute."""
    call = f"[{'[],' * 350_000}[]]"
    TaskResult.objects.using(failed._state.db).filter(pk=failed.pk).update(call=call)
    shown = text(superuser.get(page(failed)))
    assert "[[],[],[]," in shown
    assert "Cut: the first 10000 characters are shown." in shown
