"""A mark for jobs that are held because their own process publishes them.

Null without a default: no engine writes a row for it. Drainers of an earlier version may go on, and
so may writers; turn ``OUTBOX["IMMEDIATE"]`` on when all drainers are of this version, because only
these write an incident when such a hold has run out.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0009_servers"),
    ]

    operations = [
        migrations.AddField(
            "stagedjob",
            "is_immediate",
            models.BooleanField(editable=False, null=True, verbose_name="immediate"),
        ),
    ]
