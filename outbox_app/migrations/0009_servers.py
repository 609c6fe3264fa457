"""Processes of the fleet: who serves, and who calls."""

import uuid

import django.core.validators
from django.db import migrations, models

import outbox_app.fields
import outbox_app.models.clock


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0008_peers"),
    ]

    operations = [
        migrations.CreateModel(
            name="Server",
            fields=[
                ("id", models.UUIDField(default=uuid.uuid4, primary_key=True, serialize=False)),
                ("service", outbox_app.fields.CharField(max_length=80, verbose_name="service")),
                (
                    "kind",
                    outbox_app.fields.CharField(
                        choices=[("server", "is called"), ("client", "calls only")],
                        default="server",
                        max_length=6,
                        verbose_name="kind",
                    ),
                ),
                (
                    "address",
                    outbox_app.fields.CharField(blank=True, max_length=500, verbose_name="address"),
                ),
                (
                    "weight",
                    models.PositiveSmallIntegerField(
                        default=100,
                        validators=[django.core.validators.MaxValueValidator(100)],
                        verbose_name="weight",
                    ),
                ),
                ("node", outbox_app.fields.CharField(max_length=255, verbose_name="node")),
                ("version", outbox_app.fields.CharField(max_length=40, verbose_name="version")),
                ("draining", models.BooleanField(default=False, verbose_name="draining")),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(), verbose_name="started at"
                    ),
                ),
                (
                    "heartbeat_at",
                    models.DateTimeField(
                        db_default=outbox_app.models.clock.DatabaseNow(),
                        verbose_name="last heartbeat",
                    ),
                ),
                ("lease_seconds", models.FloatField(verbose_name="lease in seconds")),
            ],
            options={
                "verbose_name": "server",
                "verbose_name_plural": "servers",
                "db_table": "outbox_server",
                "indexes": [models.Index(fields=["service"], name="outbox_server_service")],
            },
        ),
    ]
