"""Addresses of the door: ``path("outbox/", include("outbox_app.door.urls"))``.

Senders call those of ``prepared/``, keepers call ``check``. A project that is neither leaves them
out. The views compose this room with ``prepared``, where they are.
"""

from __future__ import annotations

from django.urls import path

from ..prepared import views

app_name = "outbox_door"
urlpatterns = [
    path("prepared/", views.prepare, name="prepare"),
    path("prepared/decide", views.decide, name="decide"),
    path("prepared/open", views.open_events, name="open"),
    path("prepared/<uuid:id>", views.show, name="show"),
    *(
        path(f"prepared/<uuid:id>/{call}", views.decide_one, {"state": state}, name=call)
        for call, state in (("confirm", "confirmed"), ("cancel", "cancelled"))
    ),
    path("check", views.check, name="check"),
]
