"""The record of shadow mode: two tables of halves that are compared, and one of results.

Drainers of an earlier version know none of them, so nothing in them is ever published.
"""

import uuid

from django.db import migrations, models

import outbox_app.fields
import outbox_app.models.clock


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0013_task_results"),
    ]

    operations = [
        migrations.CreateModel(
            name="ShadowJob",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "key",
                    models.UUIDField(
                        default=uuid.uuid4, editable=False, unique=True, verbose_name="key"
                    ),
                ),
                ("task", outbox_app.fields.CharField(max_length=255, verbose_name="task")),
                (
                    "task_id",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="task id"
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(),
                        db_index=True,
                        editable=False,
                        verbose_name="at",
                    ),
                ),
            ],
            options={
                "db_table": "outbox_shadowjob",
                "abstract": False,
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="ShadowNote",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "key",
                    models.UUIDField(
                        default=uuid.uuid4, editable=False, unique=True, verbose_name="key"
                    ),
                ),
                ("task", outbox_app.fields.CharField(max_length=255, verbose_name="task")),
                (
                    "task_id",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="task id"
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(),
                        db_index=True,
                        editable=False,
                        verbose_name="at",
                    ),
                ),
                (
                    "in_transaction",
                    models.BooleanField(default=False, verbose_name="in a transaction"),
                ),
                (
                    "refused",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="refused"
                    ),
                ),
            ],
            options={
                "db_table": "outbox_shadownote",
                "abstract": False,
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="ShadowResult",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("task", outbox_app.fields.CharField(max_length=255, verbose_name="task")),
                (
                    "outcome",
                    outbox_app.fields.CharField(
                        choices=[
                            ("matched", "sent after its commit"),
                            ("early", "sent before its commit"),
                            ("never_sent", "committed and never sent"),
                            ("rolled_back", "sent for a rollback"),
                            ("refused", "staging would refuse the call"),
                        ],
                        max_length=20,
                        verbose_name="outcome",
                    ),
                ),
                ("count", models.BigIntegerField(verbose_name="count")),
                ("last_at", models.DateTimeField(verbose_name="last at")),
                (
                    "last_task_id",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="last task id"
                    ),
                ),
            ],
            options={
                "verbose_name": "shadow result",
                "verbose_name_plural": "shadow results",
                "db_table": "outbox_shadowresult",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(
                        fields=("task", "outcome"), name="outbox_shadow_outcome"
                    )
                ],
            },
        ),
    ]
