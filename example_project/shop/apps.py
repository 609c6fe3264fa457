"""App configuration of the shop; it connects the receiver that notes each execution."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"

    def ready(self):
        from . import notes  # noqa: F401
