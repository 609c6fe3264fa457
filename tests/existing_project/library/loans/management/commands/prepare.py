from django.core.management import call_command
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Make the tables of both databases."""

    def handle(self, **options):
        for alias in ("default", "reports"):
            call_command("migrate", database=alias, verbosity=0)
