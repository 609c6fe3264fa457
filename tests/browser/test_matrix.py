"""The permissions of every URL of our admin, for every role and every method.

The URLs come from ``admin.site.urls``: a new one fails here until it has a row. A role is a set of
permissions besides entering the admin: none, to see one kind of row, to do one action, or all. No
request of these tests changes a row.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import URLPattern, reverse
from django.utils.timezone import now

from outbox_app.django_tasks.models import TaskResult
from outbox_app.events.models import Event, Gap, ParkedStream, Subscription
from outbox_app.fleet.models import Server
from outbox_app.models import DeadJob, Incident, Overview, Process, StagedJob, Statistic
from outbox_app.prepared.models import PreparedEvent
from tests.jobs.dead.rows import dead_jobs, staged_jobs
from tests.jobs.dead.test_status import drainer

MODELS = (
    DeadJob,
    Process,
    Event,
    Gap,
    Incident,
    ParkedStream,
    PreparedEvent,
    Server,
    StagedJob,
    Statistic,
    Subscription,
    TaskResult,
)
METHODS = ("get", "head", "post", "put", "delete")
SEEN, LOGIN, FORBIDDEN, METHOD = 200, 302, 403, 405
#: A permission that nobody has, the superuser neither.
NOBODY = ""


class Row(NamedTuple):
    """Which permission opens an address, and what a POST without content gets of whoever has it.

    With another permission to ``edit``, a POST of those who have it shows the form's errors.
    """

    permission: str
    post: int = SEEN
    edit: str = NOBODY


def _rows_of(model: Any) -> dict[str, Row]:
    name = f"{model._meta.app_label}_{model._meta.model_name}"
    seen = f"view_{model._meta.model_name}"
    return {
        f"{name}_changelist": Row(seen),
        f"{name}_add": Row(NOBODY),
        f"{name}_history": Row(seen),
        f"{name}_delete": Row(NOBODY),
        # Nobody edits.
        f"{name}_change": Row(seen, FORBIDDEN),
    }


MATRIX: dict[str, Row] = {
    **{name: row for model in MODELS for name, row in _rows_of(model).items()},
    "outbox_app_overview": Row("view_process", METHOD),
    "outbox_app_overview_changelist": Row("view_process", METHOD),
    # The one form there is.
}
#: Which permission offers which action of a list.
ACTIONS = {
    "deadjob": {"requeue_selected": "requeue_deadjob", "discard_selected": "discard_deadjob"},
    "stagedjob": {"cancel_selected": "cancel_stagedjob"},
    "gap": {"skip_selected": "skip_gap"},
    "server": {"drain_selected": "change_server", "weight_selected": "change_server"},
    "parkedstream": {
        "release_selected": "replay_subscription",
        "skip_selected": "skip_event",
        "discard_selected": "skip_event",
    },
    "preparedevent": {
        "check_selected": "check_preparedevent",
        "confirm_selected": "confirm_preparedevent",
        "cancel_selected": "cancel_preparedevent",
        "extend_selected": "extend_preparedevent",
    },
    "subscription": {
        "pause_selected": "pause_subscription",
        "resume_selected": "pause_subscription",
        "replay_selected": "replay_subscription",
        "release_selected": "replay_subscription",
        "skip_selected": "skip_event",
        "forget_selected": "forget_subscription",
    },
}
#: What somebody may do, by role. None: everything.
ROLES: dict[str, tuple[str, ...] | None] = {
    "staff": (),
    **{f"views {model._meta.model_name}": (f"view_{model._meta.model_name}",) for model in MODELS},
    **{name: (name,) for model in MODELS for name, _ in model._meta.permissions},
    # Django's own: who may change may look, and nothing else comes of these.
    "writer": tuple(f"{verb}_{model._meta.model_name}" for model in MODELS
                    for verb in ("add", "delete") if verb in model._meta.default_permissions),
    "superuser": None,
}  # fmt: skip

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Do not log refusals: these tests cause hundreds of them."""
    caplog.set_level(logging.CRITICAL, "django.request")
    caplog.set_level(logging.CRITICAL, "django.security")


@pytest.fixture
def one_of_each() -> dict[str, Any]:
    """A row of each model, by its name."""
    rows = (
        staged_jobs(using="default")[0],
        dead_jobs(using="default")[0],
        drainer("default"),
        Incident.objects.create(kind="unknown", first_id=1, last_id=2),
        Event.objects.create(stream="s", version=1, type="made", slice=1),
        Subscription.objects.create(name="one"),
        ParkedStream.objects.create(subscription="one", partition=0, log="outbox_event",
                                    stream="s", version=1, position=1),
        Gap.objects.create(kind="version", subscription="one", log="outbox_event", stream="s",
                           first=1, last=1),
        Statistic.objects.create(source="x", minute=now(), name="published", value=1),
        PreparedEvent.objects.create(sender="alias:billing", event_id=uuid4(), decide_by=now()),
        Server.objects.create(service="shop", node="web-1:7", version="1", lease_seconds=10),
        TaskResult.objects.create(task_id="x", task="shop.tasks.pack", call="{}", status="READY",
                                  enqueued_at=now(), kept_from=now()),
    )  # fmt: skip
    return {row._meta.model_name: row for row in rows}


def test_every_address_has_its_row_in_the_matrix() -> None:
    assert {pattern.name for pattern in _ours()} == set(MATRIX)


def test_every_model_and_action_has_its_row() -> None:
    registered = {m for m in admin.site._registry if m._meta.app_label.startswith("outbox_")}
    assert registered == {*MODELS, Overview}
    assert set(ACTIONS) <= {model._meta.model_name for model in MODELS}


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Read each user and their permissions once per test, not once per request."""
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
    get_user = functools.cache(ModelBackend().get_user)
    monkeypatch.setattr(ModelBackend, "get_user", lambda _, user_id: get_user(user_id))


@pytest.mark.parametrize("role", ROLES)
def test_pages_open_to_whom_they_should(
    one_of_each: dict[str, Any], role: str, read_once: None
) -> None:
    client = _logged_in(role)
    token = _token(client)
    before = _everything()
    found, expected = {}, {}
    for pattern in _ours():
        row, url = MATRIX[pattern.name], _address(pattern, one_of_each)
        may = _may(role, row.permission)
        for method in METHODS:
            response = getattr(client, method)(url, headers={"X-CSRFToken": token})
            found[pattern.name, method] = response.status_code
            allowed = _expected(row, method, edits=_may(role, row.edit))
            expected[pattern.name, method] = allowed if may else FORBIDDEN
    wrong = {
        key: (status, expected[key])
        for key, status in found.items()
        if status not in _all(expected[key])
    }
    assert not wrong
    assert _everything() == before


def test_a_stranger_is_asked_to_log_in(one_of_each: dict[str, Any]) -> None:
    client = Client()
    for pattern in _ours():
        url = _address(pattern, one_of_each)
        for method in METHODS:
            response = getattr(client, method)(url)
            assert response.status_code == LOGIN, (method, url)
            assert response.url.startswith(reverse("admin:login")), (method, url)


@pytest.mark.parametrize("method", METHODS[2:])
def test_nothing_is_taken_without_a_token(one_of_each: dict[str, Any], method: str) -> None:
    client = _logged_in("superuser", enforce_csrf_checks=True)
    for pattern in _ours():
        response = getattr(client, method)(_address(pattern, one_of_each))
        assert response.status_code in (FORBIDDEN, METHOD), pattern.name


@pytest.mark.parametrize("role", ROLES)
def test_actions_are_offered_to_whom_they_should(rf: Any, role: str) -> None:
    request = rf.get("/")
    request.user = _user(role)
    for model in MODELS:
        table = ACTIONS.get(model._meta.model_name, {})
        offered = set(admin.site._registry[model].get_actions(request))
        may = ROLES[role]
        assert offered == {a for a, permission in table.items() if may is None or permission in may}


def _ours() -> list[URLPattern]:
    found = []
    for outer in admin.site.urls[0]:
        for inner in getattr(outer, "url_patterns", []):
            # Django's own, for each model: it leads to the page of a row.
            is_old_address = inner.name is None and str(inner.pattern) == "<path:object_id>/"
            if str(outer.pattern).startswith("outbox_") and not is_old_address:
                found.append(inner)
    return found


def _address(pattern: URLPattern, rows: dict[str, Any]) -> str:
    if not pattern.pattern.converters:
        return reverse(f"admin:{pattern.name}")
    model = pattern.name.split("_")[-2]
    return reverse(f"admin:{pattern.name}", args=[rows[model].pk])


def _may(role: str, permission: str) -> bool:
    may = ROLES[role]
    return permission != NOBODY and (may is None or permission in may)


def _expected(row: Row, method: str, *, edits: bool) -> int:
    if method == "post":
        return SEEN if edits else row.post
    if row.post == METHOD and method not in ("get", "head"):
        return METHOD
    return SEEN


def _all(status: int) -> tuple[int, ...]:
    # A view that takes GET only may say so before it asks who is there.
    return (status, METHOD) if status == FORBIDDEN else (status,)


def _user(role: str) -> User:
    may = ROLES[role]
    user = User.objects.create_user(role[:150], is_staff=True, is_superuser=may is None)
    rights = Permission.objects.filter(
        content_type__app_label__startswith="outbox", codename__in=may or ()
    )
    assert len(rights) == len(may or ())
    user.user_permissions.set(rights)
    return user


def _logged_in(role: str, **options: Any) -> Client:
    client = Client(**options)
    client.force_login(_user(role))
    return client


def _token(client: Client) -> str:
    return client.get(reverse("admin:index")).context["csrf_token"]


def _everything() -> list[list[Any]]:
    return [list(model.objects.order_by("pk").values()) for model in MODELS]
