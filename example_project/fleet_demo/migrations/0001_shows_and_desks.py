import uuid

import django.core.serializers.json
from django.db import migrations, models

import outbox_app.database.clock
import outbox_app.events.models.transaction
import outbox_app.fields


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Desk",
            fields=[
                (
                    "id",
                    models.CharField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="id"
                    ),
                ),
                ("version", models.BigIntegerField(verbose_name="version")),
                (
                    "state",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder, verbose_name="state"
                    ),
                ),
                ("changed_at", models.DateTimeField(verbose_name="changed at")),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="Show",
            fields=[
                (
                    "id",
                    models.CharField(
                        max_length=255, primary_key=True, serialize=False, verbose_name="id"
                    ),
                ),
                ("version", models.BigIntegerField(verbose_name="version")),
                (
                    "state",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder, verbose_name="state"
                    ),
                ),
                ("changed_at", models.DateTimeField(verbose_name="changed at")),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.CreateModel(
            name="DeskVersion",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "txid",
                    models.BigIntegerField(
                        db_default=outbox_app.events.models.transaction.CurrentTransaction(),
                        editable=False,
                        verbose_name="transaction",
                    ),
                ),
                (
                    "topic",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="topic"),
                ),
                ("stream", models.CharField(max_length=255, verbose_name="stream")),
                ("version", models.BigIntegerField(verbose_name="version")),
                ("type", models.CharField(max_length=255, verbose_name="type")),
                (
                    "data",
                    outbox_app.fields.JSONField(
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        verbose_name="data",
                    ),
                ),
                (
                    "metadata",
                    outbox_app.fields.JSONField(
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        verbose_name="metadata",
                    ),
                ),
                ("slice", models.PositiveSmallIntegerField(verbose_name="slice")),
                (
                    "message_id",
                    models.UUIDField(default=uuid.uuid4, unique=True, verbose_name="message id"),
                ),
                (
                    "recorded_at",
                    models.DateTimeField(
                        db_default=outbox_app.database.clock.DatabaseNow(),
                        editable=False,
                        verbose_name="recorded at",
                    ),
                ),
                (
                    "command_id",
                    models.CharField(max_length=255, null=True, verbose_name="command id"),
                ),
                ("command", models.CharField(max_length=255, null=True, verbose_name="command")),
                (
                    "request_hash",
                    models.CharField(max_length=64, null=True, verbose_name="request hash"),
                ),
                (
                    "rejected",
                    models.BooleanField(db_default=False, default=False, verbose_name="rejected"),
                ),
                (
                    "response",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        null=True,
                        verbose_name="response",
                    ),
                ),
                (
                    "state",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        null=True,
                        verbose_name="state",
                    ),
                ),
            ],
            options={
                "abstract": False,
                "indexes": [
                    models.Index(fields=["txid", "id"], name="fleet_demo__txid_9d851f_idx")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("stream", "version"), name="fleet_demo_deskversion_version"
                    ),
                    models.UniqueConstraint(
                        fields=("stream", "command_id"), name="fleet_demo_deskversion_command"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="ShowVersion",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "txid",
                    models.BigIntegerField(
                        db_default=outbox_app.events.models.transaction.CurrentTransaction(),
                        editable=False,
                        verbose_name="transaction",
                    ),
                ),
                (
                    "topic",
                    models.CharField(blank=True, default="", max_length=255, verbose_name="topic"),
                ),
                ("stream", models.CharField(max_length=255, verbose_name="stream")),
                ("version", models.BigIntegerField(verbose_name="version")),
                ("type", models.CharField(max_length=255, verbose_name="type")),
                (
                    "data",
                    outbox_app.fields.JSONField(
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        verbose_name="data",
                    ),
                ),
                (
                    "metadata",
                    outbox_app.fields.JSONField(
                        default=dict,
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        verbose_name="metadata",
                    ),
                ),
                ("slice", models.PositiveSmallIntegerField(verbose_name="slice")),
                (
                    "message_id",
                    models.UUIDField(default=uuid.uuid4, unique=True, verbose_name="message id"),
                ),
                (
                    "recorded_at",
                    models.DateTimeField(
                        db_default=outbox_app.database.clock.DatabaseNow(),
                        editable=False,
                        verbose_name="recorded at",
                    ),
                ),
                (
                    "command_id",
                    models.CharField(max_length=255, null=True, verbose_name="command id"),
                ),
                ("command", models.CharField(max_length=255, null=True, verbose_name="command")),
                (
                    "request_hash",
                    models.CharField(max_length=64, null=True, verbose_name="request hash"),
                ),
                (
                    "rejected",
                    models.BooleanField(db_default=False, default=False, verbose_name="rejected"),
                ),
                (
                    "response",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        null=True,
                        verbose_name="response",
                    ),
                ),
                (
                    "state",
                    outbox_app.fields.JSONField(
                        encoder=django.core.serializers.json.DjangoJSONEncoder,
                        null=True,
                        verbose_name="state",
                    ),
                ),
            ],
            options={
                "abstract": False,
                "indexes": [
                    models.Index(fields=["txid", "id"], name="fleet_demo__txid_91c7d7_idx")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("stream", "version"), name="fleet_demo_showversion_version"
                    ),
                    models.UniqueConstraint(
                        fields=("stream", "command_id"), name="fleet_demo_showversion_command"
                    ),
                ],
            },
        ),
    ]
