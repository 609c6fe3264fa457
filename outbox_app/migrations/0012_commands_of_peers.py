"""Peers are granted commands of entities."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0011_nodes_of_ids"),
    ]

    operations = [
        migrations.AddField(
            model_name="peer",
            name="commands",
            field=models.JSONField(blank=True, default=list, verbose_name="commands"),
        ),
    ]
