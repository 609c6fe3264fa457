"""URLs of the example: the shop at the root, the admin (with the outbox in it) under ``admin/``."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("example_project.shop.urls")),
]
