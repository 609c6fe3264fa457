"""One row: what a project with these apps runs, in this process. Prints what it found."""

from __future__ import annotations

import json
import re
import sys

import django

django.setup()

from django.apps import apps  # noqa: E402
from django.conf import settings  # noqa: E402
from django.contrib import admin  # noqa: E402
from django.contrib.auth.models import Permission, User  # noqa: E402
from django.core.management import call_command, get_commands, load_command_class  # noqa: E402
from django.db import connection  # noqa: E402
from django.db.migrations.recorder import MigrationRecorder  # noqa: E402
from django.test import Client, RequestFactory  # noqa: E402
from django.urls import reverse  # noqa: E402

from .lives import LIVES, said  # noqa: E402


def main() -> None:
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
    for alias in settings.DATABASES:
        call_command("migrate", database=alias, verbosity=0)
    call_command("check", fail_level="WARNING", databases=list(settings.DATABASES))
    for app, live in LIVES.items():
        if apps.is_installed(app):
            live()
    commands = {name: app for name, app in get_commands().items() if app.startswith("outbox_app")}
    for name, app in commands.items():
        load_command_class(app, name)
    ours = [app for app in apps.get_app_configs() if app.name.startswith("outbox_app")]
    labels = [app.label for app in ours]
    found = {
        "commands": sorted(commands),
        "status": json.loads(said("outbox_status", "--json")),
        **pages(labels),
        "tables": [name for name in connection.introspection.table_names() if "outbox_" in name],
        "migrations": MigrationRecorder.Migration.objects.filter(app__in=labels).count(),
        "indexes": indexes(),
        "permissions": Permission.objects.filter(content_type__app_label__in=labels).count(),
        "modules": sorted(name for name in sys.modules if name.startswith("outbox_app.")),
    }
    print("\n" + json.dumps(found))


def pages(labels: list[str]) -> dict[str, object]:
    """Return the entries of the admin's index, by label, and the texts of other pages."""
    client, request = Client(), RequestFactory().get("/admin/")
    request.user = User.objects.create_superuser("ann")
    client.force_login(request.user)
    models = [model for model in admin.site._registry if model._meta.app_label in labels]
    names = [f"{model._meta.app_label}_{model._meta.model_name}_changelist" for model in models]
    addresses = ["/admin/", *(reverse(f"admin:{name}") for name in names)]
    addresses += [f"/admin/{label}/" for label in {model._meta.app_label for model in models}]
    for address in addresses:
        answer = client.get(address)
        if answer.status_code == 302:  # to the overview
            answer = client.get(answer.url)
        assert answer.status_code == 200, (address, answer.status_code)
    return {
        "entries": {
            each["app_label"]: [str(model["name"]) for model in each["models"]]
            for each in admin.site.get_app_list(request)
            if each["app_label"] in labels
        },
        "overview": headings(client.get("/admin/outbox_app/overview/?part=live").content.decode()),
        "health": client.get("/outbox/health/").json(),
        "metrics": client.get("/outbox/metrics/").content.decode(),
    }


def headings(page: str) -> list[str]:
    """Return the headline, and the names of the figures, charts and tables, from top to bottom."""
    marks = r'<(p class="outbox-headline|dt|figcaption|caption)[^>]*>(.*?)</(?:p|dt|figc|capt)'
    texts = (re.sub(r"<[^>]*>", "", text) for _, text in re.findall(marks, page, re.DOTALL))
    return [" ".join(text.split()) for text in texts]


def indexes() -> int:
    """Return the number of indexes that are no primary key of the tables of the package."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM sqlite_master m, pragma_index_list(m.name) i "
            "WHERE m.type = 'table' AND m.name LIKE 'outbox%' AND i.origin <> 'pk'"
        )
        return int(cursor.fetchone()[0])


if __name__ == "__main__":
    main()
