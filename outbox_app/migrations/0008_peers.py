"""Services that prepared events are exchanged with over HTTP."""

import django.core.validators
from django.db import migrations, models

import outbox_app.fields


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0007_prepared_events"),
    ]

    operations = [
        migrations.CreateModel(
            name="Peer",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "name",
                    outbox_app.fields.CharField(
                        max_length=80,
                        unique=True,
                        validators=[django.core.validators.RegexValidator("\\A[^\\s:/]+\\Z")],
                        verbose_name="name",
                    ),
                ),
                (
                    "direction",
                    outbox_app.fields.CharField(
                        choices=[
                            ("sender", "prepares events here"),
                            ("keeper", "keeps events of ours"),
                            ("both", "both"),
                        ],
                        max_length=6,
                        verbose_name="direction",
                    ),
                ),
                ("address", outbox_app.fields.CharField(max_length=500, verbose_name="address")),
                (
                    "database",
                    outbox_app.fields.CharField(
                        default="default", max_length=100, verbose_name="database"
                    ),
                ),
                ("keys", models.JSONField(default=list, verbose_name="keys")),
                ("types", models.JSONField(blank=True, default=list, verbose_name="types")),
                ("topics", models.JSONField(blank=True, default=list, verbose_name="topics")),
                ("jobs", models.JSONField(blank=True, default=list, verbose_name="jobs")),
                ("limits", models.JSONField(blank=True, default=dict, verbose_name="limits")),
            ],
            options={
                "verbose_name": "peer",
                "verbose_name_plural": "peers",
                "db_table": "outbox_peer",
            },
        ),
    ]
