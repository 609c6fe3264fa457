"""The superuser for looking around in the admin; created only if DEBUG is on."""

from django.conf import settings
from django.contrib.auth import get_user_model

NAME = PASSWORD = "demo"


def make():
    """Create the user, unless it exists."""
    users = get_user_model().objects
    if settings.DEBUG and not users.filter(username=NAME).exists():
        users.create_superuser(NAME, f"{NAME}@example.com", PASSWORD)
