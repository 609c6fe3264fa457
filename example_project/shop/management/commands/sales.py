"""``manage.py sales``: the shop's own pipeline, as a command."""

from django.core.management.base import BaseCommand

from outbox_app.pipeline import pipeline


class Command(BaseCommand):
    """Prints the sales, minute by minute."""

    help = "Shows how many of each article were ordered in each minute, from the log on Spark."

    def add_arguments(self, parser):
        """Declare the options."""
        parser.add_argument(
            "--archive", default="", metavar="DIR", help="count what was pruned, too"
        )

    def handle(self, **options):
        """Run the pipeline, and print its rows."""
        with pipeline() as run:
            from example_project.shop.sales import articles_sold

            sold = articles_sold(run.read(archive=options["archive"]))
            self.stdout.write("Sold, minute by minute (UTC), as the shop's own pipeline has it:")
            for row in sold.collect():
                self.stdout.write(
                    f"{row.minute:%Y-%m-%d %H:%M}  article {row.article:>3}  "
                    f"{row.orders:>5} orders  {row.pieces:>6} pieces"
                )
