"""The door, where a project would include it."""

from django.urls import include, path

urlpatterns = [path("outbox/", include("outbox_app.door.urls"))]
