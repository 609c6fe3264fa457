"""URLs of the door: ``path("outbox/", include("outbox_app.door.urls"))``.

Each capability adds the addresses of its own views, by its doors.
"""

from __future__ import annotations

from ..capability import all_doors

app_name = "outbox_door"
urlpatterns = [route for doors in all_doors() for route in doors.routes()]
