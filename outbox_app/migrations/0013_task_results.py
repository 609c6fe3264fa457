"""Results of tasks of django.tasks."""

from django.db import migrations, models

import outbox_app.fields


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0012_commands_of_peers"),
    ]

    operations = [
        migrations.CreateModel(
            name="TaskResult",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "task_id",
                    outbox_app.fields.CharField(max_length=36, unique=True, verbose_name="task id"),
                ),
                ("task", outbox_app.fields.CharField(max_length=255, verbose_name="task")),
                ("call", outbox_app.fields.TextField(verbose_name="call")),
                (
                    "status",
                    outbox_app.fields.CharField(
                        choices=[
                            ("READY", "ready"),
                            ("RUNNING", "running"),
                            ("FAILED", "failed"),
                            ("SUCCESSFUL", "successful"),
                        ],
                        max_length=10,
                        verbose_name="status",
                    ),
                ),
                ("enqueued_at", models.DateTimeField(verbose_name="enqueued at")),
                ("started_at", models.DateTimeField(null=True, verbose_name="started at")),
                (
                    "last_attempted_at",
                    models.DateTimeField(null=True, verbose_name="last attempted at"),
                ),
                ("finished_at", models.DateTimeField(null=True, verbose_name="finished at")),
                ("kept_from", models.DateTimeField(db_index=True, verbose_name="kept from")),
                (
                    "return_value",
                    outbox_app.fields.TextField(default="null", verbose_name="return value"),
                ),
                ("errors", outbox_app.fields.TextField(default="[]", verbose_name="errors")),
                ("worker_ids", outbox_app.fields.TextField(default="[]", verbose_name="workers")),
            ],
            options={
                "verbose_name": "task result",
                "verbose_name_plural": "task results",
                "db_table": "outbox_taskresult",
                "permissions": [
                    ("view_payload_taskresult", "Can see arguments and results of tasks")
                ],
            },
        ),
    ]
