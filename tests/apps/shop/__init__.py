"""A project whose INSTALLED_APPS has the apps that the environment names."""

from .celery import app

__all__ = ["app"]
