"""The app of the browser tests: long decisions show their progress page after each batch."""

from __future__ import annotations

from django.apps import AppConfig


class BrowserConfig(AppConfig):
    name = "tests.browser"

    def ready(self) -> None:
        from outbox_app.admin import actions

        actions.SECONDS = 0.0
