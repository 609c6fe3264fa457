"""Settings of the example project as the browser tests run it.

Everything is as in the example, but for four things: each page comes with a strict content
security policy, there are subscriptions in trouble to look at, the host has a name of its own, as
the pictures in the documentation show it, and with ``SECOND_DATABASE_URL`` there are two outboxes.
"""

from __future__ import annotations

import socket

from example_project.settings import *  # noqa: F403
from example_project.settings import DATABASES, INSTALLED_APPS, MIDDLEWARE, OUTBOX, env

INSTALLED_APPS = [*INSTALLED_APPS, "tests.browser"]
MIDDLEWARE = ["tests.browser.policy.StrictPolicy", *MIDDLEWARE]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
socket.gethostname = lambda: "shop-1"
if second := env.str("SECOND_DATABASE_URL", default=""):
    DATABASES["second"] = env.db_url_config(second)
    OUTBOX["ADMIN_DATABASES"] = ("second",)
