"""The user with whom to look around in the admin; made only where DEBUG is on."""

from django.conf import settings
from django.contrib.auth import get_user_model

NAME = PASSWORD = "demo"


def make():
    """Make the user, unless it is there."""
    users = get_user_model().objects
    if settings.DEBUG and not users.filter(username=NAME).exists():
        users.create_superuser(NAME, f"{NAME}@example.com", PASSWORD)
