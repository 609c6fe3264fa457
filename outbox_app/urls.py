"""Addresses for machines: ``include("outbox_app.urls")`` gives ``health/`` and ``metrics/``.

They use no limits, and the outbox's own database. For others write a pattern of your own with the
view's arguments: ``path("health/", views.health, {"max_age": 60})``.
"""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "outbox"
urlpatterns = [
    path("health/", views.health, name="health"),
    path("metrics/", views.metrics, name="metrics"),
]
