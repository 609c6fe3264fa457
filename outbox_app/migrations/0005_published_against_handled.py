from django.db import migrations, models


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
    ]
