"""URLs of both projects: the door alone."""

from django.urls import include, path

urlpatterns = [path("outbox/", include("outbox_app.door.urls"))]
