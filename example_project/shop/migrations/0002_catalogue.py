"""The articles of the shop, so that there is something to order from the start."""

from decimal import Decimal

from django.db import migrations

ARTICLES = [
    ("Tea pot", Decimal("24.90")),
    ("Reading lamp", Decimal("59.00")),
    ("Wool blanket", Decimal("89.50")),
    ("Garden chair", Decimal("129.00")),
]


def fill(apps, schema_editor):
    Stock = apps.get_model("shop", "Stock")
    for name, price in ARTICLES:
        Stock.objects.using(schema_editor.connection.alias).get_or_create(
            name=name, defaults={"price": price, "on_hand": 1000}
        )


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(fill, migrations.RunPython.noop)]
