"""App configuration of the shop; it connects the receiver that notes each execution."""

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate

#: Pieces of each article on its shelf in the beginning.
PIECES = 1000


def fill_shelves(sender, using, **kwargs):
    """Give each article a shelf. A migration should not: a command runs today's code."""
    Shelf, Stock = sender.get_model("Shelf"), sender.get_model("Stock")
    if Shelf._meta.db_table in connections[using].introspection.table_names():
        for pk in Stock.objects.values_list("pk", flat=True):
            Shelf.execute(str(pk), "fill", {"pieces": PIECES}, command_id="first")


class ShopConfig(AppConfig):
    name = "example_project.shop"

    def ready(self):
        from . import notes  # noqa: F401

        post_migrate.connect(fill_shelves, sender=self)
