"""The app of the browser tests.

Long decisions show their progress page after each batch. Tracebacks name the files of a project in
``/srv/shop``, as the pictures of the documentation show them.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from django.apps import AppConfig


class BrowserConfig(AppConfig):
    name = "tests.browser"

    def ready(self) -> None:
        from outbox_app.admin import actions

        actions.SECONDS = 0.0
        traceback.format_exception = _deployed(traceback.format_exception)


def _deployed(format_exception: Any) -> Any:
    """Return the function, which names files where a project that is deployed has them."""
    here = Path(__file__).parent
    places = {f"{here}/": "/srv/shop/", f"{here.parents[1]}/": "/srv/shop/lib/"}

    def format_deployed(*arguments: Any, **options: Any) -> list[str]:
        lines = format_exception(*arguments, **options)
        for folder, place in places.items():
            lines = [line.replace(folder, place) for line in lines]
        return lines

    return format_deployed
