"""The ids of commands whose versions retention has removed: a repeat is not executed again.

Versions that were pruned before this migration have left no id.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0015_overview"),
    ]

    operations = [
        migrations.CreateModel(
            name="PrunedCommand",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "log",
                        "key",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("version", models.BigIntegerField(verbose_name="version")),
                ("key", models.UUIDField(verbose_name="key")),
                ("log", models.IntegerField(verbose_name="log")),
                ("executed_on", models.DateField(verbose_name="executed on")),
            ],
            options={
                "db_table": "outbox_prunedcommand",
                "default_permissions": (),
                "indexes": [models.Index(fields=["executed_on"], name="outbox_pruned_executed")],
            },
        ),
    ]
