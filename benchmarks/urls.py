"""URLs of the benchmarks: the admin, the door, and a view beside it for ``door``."""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin
from django.http import HttpRequest, JsonResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt


@csrf_exempt
def hot(request: HttpRequest, key: str) -> JsonResponse:
    """Execute a command as a project's own view does, for ``door``."""
    from .models import Hot

    arguments: Any = json.loads(request.body)
    outcome = Hot.execute("hot", "add", arguments, command_id=f"view:{key}")
    return JsonResponse({"response": outcome.response, "version": outcome.version})


urlpatterns = [
    path("admin/", admin.site.urls),
    path("outbox/", include("outbox_app.door.urls")),
    path("hot/<str:key>", hot),
]
