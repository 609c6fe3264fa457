"""Addresses of both projects: the door, and nothing else."""

from django.urls import include, path

urlpatterns = [path("outbox/", include("outbox_app.door.urls"))]
