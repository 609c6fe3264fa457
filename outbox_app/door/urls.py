"""URLs of the door: ``path("outbox/", include("outbox_app.door.urls"))``.

Senders call ``prepared/``, keepers call ``check``, and peers with granted commands call
``entities/``. The views are in ``prepared`` and ``entities``, which use this package.
"""

from __future__ import annotations

from django.urls import path

from ..entities import views as commands
from ..prepared import views

app_name = "outbox_door"
urlpatterns = [
    path("prepared/", views.prepare, name="prepare"),
    path("prepared/decide", views.decide, name="decide"),
    path("prepared/open", views.open_events, name="open"),
    path("prepared/<uuid:id>", views.show, name="show"),
    path("prepared/<uuid:id>/confirm", views.decide_one, {"state": "confirmed"}, name="confirm"),
    path("prepared/<uuid:id>/cancel", views.decide_one, {"state": "cancelled"}, name="cancel"),
    path("check", views.check, name="check"),
    path("entities/<str:type>/<path:id>/<str:command>", commands.execute, name="execute"),
    path("routed", commands.routed, name="routed"),
    path("openapi.json", commands.openapi, name="openapi"),
]
