"""URLs of the example: the shop at the root, the admin (with the outbox in it) under ``admin/``.

``outbox/health/`` is for a check from outside, ``outbox/metrics/`` for Prometheus.
"""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("outbox/", include("outbox_app.urls")),
    path("", include("example_project.shop.urls")),
]
