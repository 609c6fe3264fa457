"""People of each role, logged in, and rows for them to look at.

Users and sessions are on ``default``; the outbox is on the alias under test.
"""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

VIEW = ("view_stagedjob", "view_deadjob", "view_process", "view_incident")
#: What each role may do, besides entering the admin.
ROLES = {
    "anonymous": None,
    "staff": (),
    "viewer": VIEW,
    "requeuer": (*VIEW, "requeue_deadjob"),
    "discarder": (*VIEW, "discard_deadjob"),
    "canceller": (*VIEW, "cancel_stagedjob"),
    "releaser": (*VIEW, "release_stagedjob"),
    "burier": (*VIEW, "bury_stagedjob"),
    "blind": (
        "requeue_deadjob",
        "discard_deadjob",
        "cancel_stagedjob",
        "release_stagedjob",
        "bury_stagedjob",
        "delete_stagedjob",
        "view_payload_stagedjob",
        "view_payload_deadjob",
    ),
    "superuser": None,
}


@pytest.fixture
def log_in():
    """``log_in(role)``: a test client for a user of this role. Options go to ``Client``."""

    def make(role, *, permissions=(), **options):
        client = Client(**options)
        if role == "anonymous":
            return client
        user = User.objects.create_user(
            f"<b>{role}</b>", is_staff=True, is_superuser=role == "superuser"
        )
        names = (*(ROLES.get(role) or ()), *permissions)
        rights = Permission.objects.filter(
            content_type__app_label__startswith="outbox", codename__in=names
        )
        assert len(rights) == len(names)
        user.user_permissions.set(rights)
        client.force_login(user)
        return client

    return make


@pytest.fixture
def superuser(log_in):
    return log_in("superuser")


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/admin/" in str(item.path).replace("\\", "/"):
            mark = item.get_closest_marker("django_db")
            options = {"databases": "__all__", **(mark.kwargs if mark else {})}
            if "alias" in getattr(item, "fixturenames", ()):
                # Users and sessions are on "default"; what a test commits is flushed where it may.
                alias = item.callspec.params["alias"]
                flushed = list({"default", alias}) if options.get("transaction") else "__all__"
                options["databases"] = flushed
            item.add_marker(pytest.mark.django_db(**options), append=False)
