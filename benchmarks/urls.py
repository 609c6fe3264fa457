"""Addresses of the benchmarks: the admin.

Only ``benchmarks.admin`` asks for them.
"""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
