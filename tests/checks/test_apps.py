"""The Celery apps of a process, and the commands that run the checks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from uuid import uuid4

import celery
import pytest
from celery import Celery
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from outbox_app.celery import OutboxCelery
from outbox_app.checks.apps import check_apps
from outbox_app.checks.brokers import check_brokers, check_transports
from outbox_app.checks.servers import check_servers
from outbox_app.exceptions import BrokerUnavailable
from outbox_app.jobs.drain.misconfiguration import find_transport
from tests import forking, tasks

ROOT = Path(__file__).resolve().parents[2]


def messages_of(app):
    """What is said about this app: other tests' apps may be alive."""
    return [message for message in check_apps() if app.main in message.msg]


def django_check(*arguments, **variables):
    command = [sys.executable, "-m", "django", "check", *arguments]
    done = forking.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    return done.returncode, done.stderr


def test_project_without_an_app_is_warned():
    code, said = django_check(DJANGO_SETTINGS_MODULE="tests.settings")
    assert code == 0
    assert "outbox.W001" in said


def test_example_project_is_well(tmp_path):
    code, said = django_check(
        "--fail-level",
        "WARNING",
        DJANGO_SETTINGS_MODULE="example_project.settings",
        DATABASE_URL=f"sqlite:///{tmp_path}/db.sqlite3",
    )
    assert (code, said) == (0, "")


def test_command_refuses_nonsense(tmp_path):
    (tmp_path / "nonsense.py").write_text(
        "from tests.settings import *\nOUTBOX = {'BATCH_SIZE': 0}\n"
    )
    code, said = django_check(DJANGO_SETTINGS_MODULE="nonsense", PYTHONPATH=str(tmp_path))
    assert code == 1
    assert "(outbox.E003) OUTBOX['BATCH_SIZE'] is 0; expected an integer of at least 1." in said


def test_app_is_well(make_app):
    assert messages_of(make_app()) == []


def test_plain_apps_are_not_ours():
    app = Celery(f"plain-{uuid4()}", set_as_current=False)
    app.conf.accept_content = ["pickle"]
    assert messages_of(app) == []
    app.close()


def test_modules_that_cannot_be_imported(make_app):
    app = make_app(imports=["tests.no_such_module"])
    [message] = messages_of(app)
    assert message.id == "outbox.W031"
    why = "ModuleNotFoundError: No module named 'tests.no_such_module'"
    assert message.msg.endswith(f", with its task modules: {why}.")


@pytest.mark.parametrize("serializer", ["pickle", "yaml"])
def test_serializer_that_workers_refuse(make_app, serializer):
    [message] = messages_of(make_app(task_serializer=serializer))
    assert message.id == "outbox.W003"
    assert f"'{serializer}'" in message.msg


def test_serializer_of_one_task(make_app):
    app = make_app()
    app.task(name=f"add-{uuid4()}", serializer="pickle", shared=False)(tasks.add)
    assert [message.id for message in messages_of(app)] == ["outbox.W003"]


def test_attribute_that_is_no_mode(make_app):
    app = make_app()
    app.task(name="ping", outbox=False, shared=False)(tasks.add)
    app.task(name="pong", outbox="send", shared=False)(tasks.add)
    [message] = [each for each in check_apps() if each.id == "outbox.E048"]
    assert "task ping is False" in message.msg


def test_patterns_that_decide_for_no_task(make_app, settings):
    app = make_app()
    app.task(name="shop.ping", shared=False)(tasks.add)
    modes = {"shop.p*": "send", "shop.ping": "stage", "shopp.*": "send", "*": "stage"}
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": modes}
    [message] = [each for each in check_apps() if each.id == "outbox.W039"]
    assert message.msg.endswith(": shop.ping, shopp.*.")


def test_apps_of_one_name():
    name = f"twice-{uuid4().hex}"
    apps = [OutboxCelery(name, broker="memory://", set_as_current=False) for _ in range(2)]
    assert [message.id for message in messages_of(apps[0])] == ["outbox.E010"]
    for app in apps:
        app.close()


@pytest.mark.parametrize(
    ("broker", "ids"), [("memory://other", ["outbox.E010"]), ("memory://", [])]
)
def test_plain_app_of_that_name(broker, ids):
    """What stage() is given of it goes to the broker of the one that stages by itself."""
    name = f"twice-{uuid4().hex}"
    app = OutboxCelery(name, broker="memory://", set_as_current=False)
    plain = Celery(name, broker=broker, set_as_current=False)
    assert [message.id for message in messages_of(app)] == ids
    for each in (app, plain):
        each.close()


def test_app_without_a_name():
    app = OutboxCelery(broker="memory://", set_as_current=False)
    assert "outbox.W012" in [message.id for message in check_apps()]
    app.close()


def test_configuration_that_cannot_be_loaded_here(make_app):
    app = OutboxCelery(f"elsewhere-{uuid4().hex}", set_as_current=False)
    app.config_from_object("tests.no_such_configuration")
    [message] = messages_of(app)
    assert message.id == "outbox.W031"
    assert "task modules: ModuleNotFoundError: module 'tests' has no attribute" in message.msg
    with pytest.raises(BrokerUnavailable, match="here: ModuleNotFoundError: module 'tests' has "):
        find_transport(app)
    assert [m.id for m in check_brokers() if app.main in m.msg] == ["outbox.W015"]
    assert not [m for m in check_transports() if app.main in m.msg]
    check_servers(databases=["default"])  # and no error
    app.close()


@pytest.mark.parametrize(
    ("current", "named"),
    [("plain", "shop.tasks.bound, shop.tasks.shared."), ("edited", "shop.tasks.bound.")],
)
def test_tasks_that_are_called_on_an_app_that_does_not_stage(tmp_path, current, named):
    """The project has two apps, and the one that its tasks use was not edited."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from celery import Celery\n"
        "from outbox_app.celery import OutboxCelery\n"
        "edited = OutboxCelery('edited', broker='memory://')\n"
        "plain = Celery('plain', broker='memory://', include=['shop.tasks'])\n"
    )
    (package / "tasks.py").write_text(
        "from celery import shared_task\n"
        "from shop import edited, plain\n"
        "@plain.task\ndef bound(): ...\n"
        "@shared_task\ndef shared(): ...\n"
        "@edited.task\ndef staged(): ...\n"
    )
    (tmp_path / "shop_settings.py").write_text(
        f"import shop\nfrom tests.settings import *\nshop.{current}.set_current()\n"
    )
    code, said = django_check(
        DJANGO_SETTINGS_MODULE="shop_settings", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"
    )
    assert code == 0
    assert said.count("outbox.W032") == 1
    assert "app 'plain', which does not stage" in said
    assert f"even in a transaction: {named}" in said


@pytest.mark.parametrize("installed", [False, True])
def test_an_app_in_celery_py_that_is_not_installed(tmp_path, installed):
    (tmp_path / "forgetful.py").write_text(
        "from outbox_app.celery import OutboxCelery\n"
        "app = OutboxCelery('forgetful', broker='memory://')\n"
        "SECRET_KEY = 'x'\n"
        f"INSTALLED_APPS = {['outbox_app'] * installed}\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
        "SILENCED_SYSTEM_CHECKS = ['outbox.W025']\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code, said = django_check(DJANGO_SETTINGS_MODULE="forgetful", PYTHONPATH=path)
    if installed:
        assert (code, said) == (0, "")
    else:
        assert code == 1
        assert "(outbox.E049) OutboxCelery needs outbox_app, which INSTALLED_APPS does not" in said
        assert 'HINT: Add "outbox_app" to INSTALLED_APPS, and run manage.py migrate.' in said


def test_tables_that_are_missing(tmp_path):
    """``migrate`` runs the checks as well, before it creates them, and says nothing of it."""
    (tmp_path / "unmigrated.py").write_text(
        "from tests.settings import *\n"
        "INSTALLED_APPS = ['outbox_app', 'outbox_app.ids']\n"
        f"DATABASES = {{'default': {{**DATABASES['default'], 'NAME': '{tmp_path}/x'}}}}\n"
        "OUTBOX, DATABASE_ROUTERS, ROOT_URLCONF = {}, [], ''\n"
    )
    variables = {"DJANGO_SETTINGS_MODULE": "unmigrated"}
    variables["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    arguments = ("--database", "default")
    assert "outbox.W053" not in django_check(**variables)[1]
    code, said = django_check(*arguments, **variables)
    assert code == 0
    assert "(outbox.W053) Database 'default' lacks tables of outbox_app: outbox_deadjob," in said
    assert "HINT: Run manage.py migrate outbox_app --database default." in said
    assert "lacks tables of outbox_app.ids: outbox_node." in said
    command = [sys.executable, "-m", "django", "migrate", "outbox_app", "--verbosity", "0"]
    done = forking.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert (done.returncode, "W053" in done.stderr) == (0, False)
    said = django_check(*arguments, **variables)[1]
    assert said.count("outbox.W053") == 1
    assert "lacks tables of outbox_app.ids" in said


def test_forgotten_in_installed_apps(tmp_path):
    (tmp_path / "forgetful.py").write_text(
        "SECRET_KEY = 'x'\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
    )
    script = (
        "import django; django.setup()\n"
        "from django.db import transaction\n"
        "from outbox_app.celery import OutboxCelery\n"
        "app = OutboxCelery('forgetful', broker='memory://')\n"
        "with transaction.atomic(): app.send_task('any')\n"
    )
    done = forking.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "forgetful",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        },
        capture_output=True,
        text=True,
    )
    assert 'Add "outbox_app" to INSTALLED_APPS' in done.stderr


def test_an_old_celery_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(celery, "VERSION", (5, 4, "9"))
    monkeypatch.setattr(celery, "__version__", "5.4.9")
    with pytest.raises(ImproperlyConfigured, match=r"needs Celery 5\.5 or later, and 5\.4\.9 is"):
        apps.get_app_config("outbox_app").ready()
