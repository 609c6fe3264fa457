from django.db import migrations, models

from ._collation import compare_bytes


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0004_events_skipped"),
    ]

    operations = [
        migrations.AddField(
            model_name="cursor",
            name="counted",
            field=models.JSONField(editable=False, null=True, verbose_name="counted since"),
        ),
        # JSON of MariaDB comes with a collation of its own.
        migrations.RunPython(
            compare_bytes("outbox_cursor"), migrations.RunPython.noop, atomic=False
        ),
    ]
