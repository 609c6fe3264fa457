"""Prepared events, at their keeper, and fences, in the databases of senders."""

import django.core.serializers.json
from django.db import migrations, models

import outbox_app.fields
import outbox_app.models.clock


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0006_processes"),
    ]

    operations = [
        migrations.CreateModel(
            name="Fence",
            fields=[
                (
                    "event_id",
                    models.UUIDField(primary_key=True, serialize=False, verbose_name="event id"),
                ),
                (
                    "outcome",
                    outbox_app.fields.CharField(
                        choices=[
                            ("committed", "committed"),
                            ("rolled_back", "rolled back"),
                            ("pruned", "pruned"),
                        ],
                        max_length=11,
                        verbose_name="outcome",
                    ),
                ),
                (
                    "keeper",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=80, verbose_name="keeper"
                    ),
                ),
                (
                    "written_at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(),
                        db_index=True,
                        verbose_name="written at",
                    ),
                ),
            ],
            options={
                "verbose_name": "fence",
                "verbose_name_plural": "fences",
                "db_table": "outbox_fence",
            },
        ),
        migrations.AlterField(
            model_name="incident",
            name="kind",
            field=outbox_app.fields.CharField(
                choices=[
                    ("takeover", "shards taken over from a dead drainer"),
                    ("unknown", "outcome of a publish unknown"),
                    ("requeue", "requeued by a person"),
                    ("contradiction", "prepared event: told to confirm and to cancel"),
                ],
                max_length=20,
                verbose_name="kind",
            ),
        ),
        migrations.CreateModel(
            name="PreparedEvent",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("sender", outbox_app.fields.CharField(max_length=100, verbose_name="sender")),
                ("event_id", models.UUIDField(verbose_name="event id")),
                (
                    "log",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=128, verbose_name="log"
                    ),
                ),
                (
                    "stream",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="stream"
                    ),
                ),
                (
                    "type",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="type"
                    ),
                ),
                (
                    "topic",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="topic"
                    ),
                ),
                (
                    "content",
                    models.JSONField(
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        verbose_name="content",
                    ),
                ),
                (
                    "content_hash",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=64, verbose_name="content hash"
                    ),
                ),
                (
                    "state",
                    outbox_app.fields.CharField(
                        choices=[
                            ("prepared", "prepared"),
                            ("undecided", "undecided"),
                            ("confirmed", "confirmed"),
                            ("cancelled", "cancelled"),
                        ],
                        default="prepared",
                        max_length=9,
                        verbose_name="state",
                    ),
                ),
                (
                    "policy",
                    outbox_app.fields.CharField(
                        choices=[
                            ("ask", "a person decides"),
                            ("cancel", "cancel"),
                            ("confirm", "confirm"),
                        ],
                        default="ask",
                        max_length=7,
                        verbose_name="policy",
                    ),
                ),
                (
                    "prepared_at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(),
                        editable=False,
                        verbose_name="prepared at",
                    ),
                ),
                ("decide_by", models.DateTimeField(verbose_name="decide by")),
                (
                    "next_check_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="next check at"),
                ),
                ("asked", models.PositiveIntegerField(default=0, verbose_name="asked")),
                ("answered", models.PositiveIntegerField(default=0, verbose_name="answered")),
                (
                    "unreachable",
                    models.PositiveIntegerField(default=0, verbose_name="not answered"),
                ),
                (
                    "last_answer",
                    outbox_app.fields.TextField(blank=True, default="", verbose_name="last answer"),
                ),
                (
                    "decided_at",
                    models.DateTimeField(blank=True, null=True, verbose_name="decided at"),
                ),
                (
                    "decided_by",
                    outbox_app.fields.CharField(
                        blank=True, default="", max_length=255, verbose_name="decided by"
                    ),
                ),
                (
                    "reason",
                    outbox_app.fields.TextField(blank=True, default="", verbose_name="reason"),
                ),
            ],
            options={
                "verbose_name": "prepared event",
                "verbose_name_plural": "prepared events",
                "db_table": "outbox_prepared",
                "permissions": [
                    ("check_preparedevent", "Can have senders asked about prepared events"),
                    ("confirm_preparedevent", "Can confirm prepared events"),
                    ("cancel_preparedevent", "Can cancel prepared events"),
                    ("extend_preparedevent", "Can extend prepared events"),
                    ("view_payload_preparedevent", "Can see what prepared events contain"),
                ],
                "indexes": [
                    models.Index(fields=["sender", "next_check_at"], name="outbox_prepared_check"),
                    models.Index(fields=["state", "prepared_at"], name="outbox_prepared_state"),
                    models.Index(fields=["state", "decide_by"], name="outbox_prepared_decide_by"),
                    models.Index(fields=["decided_at"], name="outbox_prepared_decided"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("event_id", "sender"), name="outbox_prepared_event"
                    )
                ],
            },
        ),
    ]
