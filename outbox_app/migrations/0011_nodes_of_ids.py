"""Nodes: the time of each that is reserved for ids."""

from typing import Any

from django.db import migrations, models


def add_nodes(apps: Any, schema_editor: Any) -> None:
    node = apps.get_model("outbox_app", "Node")
    rows = [node(datacentre=d, node=n) for d in range(8) for n in range(32)]
    node.objects.using(schema_editor.connection.alias).bulk_create(rows)


class Migration(migrations.Migration):
    dependencies = [
        ("outbox_app", "0010_immediate_delivery"),
    ]

    operations = [
        migrations.CreateModel(
            name="Node",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("datacentre", models.PositiveSmallIntegerField(verbose_name="datacentre")),
                ("node", models.PositiveSmallIntegerField(verbose_name="node")),
                ("owner", models.UUIDField(null=True, verbose_name="owner")),
                ("reserved_ms", models.BigIntegerField(default=0, verbose_name="reserved up to")),
            ],
            options={
                "verbose_name": "node",
                "verbose_name_plural": "nodes",
                "db_table": "outbox_node",
                "constraints": [
                    models.UniqueConstraint(fields=("datacentre", "node"), name="outbox_node_pair")
                ],
            },
        ),
        migrations.RunPython(add_nodes, migrations.RunPython.noop),
    ]
