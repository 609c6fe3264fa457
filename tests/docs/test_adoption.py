"""The guide to moving a project task by task: its commands and settings run in its order."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/adopt.md").read_text()
SETTINGS = """
from pathlib import Path

SECRET_KEY = "a shop"
USE_TZ = True
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "shop.views"
INSTALLED_APPS = ["outbox_app", "outbox_app.shadow"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(__file__).with_name("db.sqlite3"),
        "ATOMIC_REQUESTS": True,
    }
}
"""
FILES = {
    "settings.py": SETTINGS,
    "__init__.py": "from .celery import app\n",
    "celery.py": "from celery import Celery\n\napp = Celery('shop', broker='memory://')\n",
    "tasks.py": "from .celery import app\n\n\n@app.task\ndef send_receipt(order): ...\n",
    "views.py": """from django.http import HttpResponse
from django.urls import path

from .tasks import send_receipt


def buy(request, order):
    # The order is saved here.
    send_receipt.delay(order)
    if not order:
        raise ValueError("no such order")
    return HttpResponse()


urlpatterns = [path("<int:order>", buy)]
""",
}
MANAGE = """import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
TEST = """import pytest
@pytest.mark.django_db
@pytest.mark.parametrize("order", [1, 2])
def test_buy(client, order):
    assert client.get(f"/{order}").status_code == 200
"""
#: One order is bought, one fails; then an hour goes by.
TRAFFIC = """
from django.test import Client
from outbox_app.shadow import producer
from outbox_app.shadow.models import ShadowJob, ShadowNote
from outbox_app.models import StagedJob
client = Client(raise_request_exception=False)
print([client.get(f"/{order}").status_code for order in (1, 0)])
producer.writer.drain(60)
for model in (ShadowJob, ShadowNote):
    model.objects.update(at="2020-01-01T00:00:00Z")
print("staged:", StagedJob.objects.count())
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "shop" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "manage.py").write_text(MANAGE)
    (tmp_path / "test_shop.py").write_text(TEST)
    return tmp_path


def test_the_guide_step_by_step(shop: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{shop}:{ROOT}"}
    environment["DJANGO_SETTINGS_MODULE"] = "shop.settings"

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = forking.run(command, cwd=shop, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def type_next() -> str:
        _, *words = commands.pop(0).removeprefix("$ ").split()
        return run("-m", "pytest", *words) if "--outbox-detect=log" in words else run(*words)

    def configure(text: str) -> None:
        settings = shop / "shop/settings.py"
        settings.write_text(settings.read_text() + text)

    commands = blocks("console")
    _, imported, sent, in_shadow, staged, _ = blocks("python")

    expected = blocks("text")[0].splitlines()[1:]
    assert "\n".join(expected) in type_next()

    celery = shop / "shop/celery.py"
    celery.write_text(celery.read_text().replace("from celery import Celery\n", imported))
    configure(sent)
    type_next()
    configure(in_shadow)
    assert run("manage.py", "shell", "-v0", "-c", TRAFFIC) == "[200, 500]\nstaged: 0\n"
    figures = type_next().splitlines()
    assert figures[0] == (
        "shop.tasks.send_receipt: matched=0 early=1 never_sent=0 rolled_back=1 refused=0"
    )

    configure(staged)
    assert run("manage.py", "shell", "-v0", "-c", TRAFFIC) == "[200, 500]\nstaged: 1\n"
    assert not commands
