"""Drainers are processes: the table also holds those that run subscriptions.

Drainers and subscriptions of an earlier version have to be stopped before: they would find no table
for their heartbeats, report trouble and move nothing. Writers may go on staging.
"""

from collections.abc import Callable
from typing import Any

from django.apps import apps as installed
from django.db import migrations, models


def rename_permissions(old: str, new: str) -> Callable[[Any, Any], None]:
    """Return the code of a ``RunPython`` that lets users and groups keep what they may do.

    Django renames the content type of a renamed model, and leaves its permissions as they are.
    """

    def rename(apps: Any, schema_editor: Any) -> None:
        connection = schema_editor.connection
        # Through the installed model: a project without django.contrib.auth can migrate as well.
        if not installed.is_installed("django.contrib.auth"):
            return
        if "auth_permission" not in connection.introspection.table_names():
            return
        from django.contrib.auth.models import Permission

        permissions = Permission.objects.using(connection.alias).filter(
            content_type__app_label="outbox_app", content_type__model__in=(old, new)
        )
        taken = set(permissions.values_list("codename", flat=True))
        for permission in permissions.filter(codename__endswith=f"_{old}"):
            permission.codename = f"{permission.codename.removesuffix(old)}{new}"
            permission.name = permission.name.replace(old, new)
            if permission.codename not in taken:
                permission.save(using=connection.alias, update_fields=["codename", "name"])

    return rename


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0005_published_against_handled"),
    ]

    operations = [
        migrations.RenameModel("Drainer", "Process"),
        migrations.AlterModelTable("process", "outbox_process"),
        migrations.AlterModelOptions(
            "process",
            {
                "permissions": [
                    ("view_query_process", "Can see the queries of sessions that block work")
                ],
                "verbose_name": "process",
                "verbose_name_plural": "processes",
            },
        ),
        migrations.RenameField("process", "published", "done"),
        migrations.AlterField(
            "process", "done", models.BigIntegerField(default=0, verbose_name="done")
        ),
        migrations.RemoveField("process", "expired"),
        migrations.RunPython(
            rename_permissions("drainer", "process"), rename_permissions("process", "drainer")
        ),
    ]
