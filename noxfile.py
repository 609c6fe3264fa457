"""Tests with the oldest and the newest supported versions: ``make test-matrix``.

nox uses the installed interpreters, and skips the missing ones with a message. Each session has its
own private servers, and runs the tests of the folders that depend on Python, Django, Celery or a
driver; options after ``--`` are passed to pytest. Only ``make test`` tests Spark, the browser,
types and style.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import tomllib
from pathlib import Path

import nox

nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True
# pyenv's own commands find only interpreters that are switched on.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
for folder in sorted(PYENV.glob("versions/3.*/bin")):
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"

EXTRAS = ("postgres", "mysql", "redis", "prometheus", "door", "coordination", "tasks", "example")
#: Packages of the group "test". The others check types, or are for tests that do not run here.
RUNNERS = ("httpx2", "hypothesis", "opentelemetry-sdk", "pytest", "pyyaml")
ROOMS = ("admin", "checks", "django_tasks", "door", "entities", "events", "ids", "jobs", "mixin")
ROOMS += ("monitoring", "prepared", "process", "receipts", "shadow", "testing", "text")
#: Versions of Python and Django. Celery and all other packages are the newest ones.
NEWEST = [
    ("3.11", "5.2"),
    ("3.12", "5.2"),
    ("3.12", "6.0"),
    ("3.13", "5.2"),
    ("3.13", "6.0"),
    ("3.13", "6.1"),
    ("3.14", "6.1"),
]


def requirements(*, lowest: bool) -> list[str]:
    """Return the requirements of setup.cfg, or pin them to the oldest versions."""
    config = configparser.ConfigParser()
    config.read(Path(__file__).with_name("setup.cfg"))
    extras = config["options.extras_require"]
    lines = config["options"]["install_requires"].split()
    for name in EXTRAS:
        lines += extras[name].split()
    if lowest:
        lines = [re.sub(r">=([\d.]+)", r"==\1.*", line) for line in lines]
    groups = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())
    test = groups["dependency-groups"]["test"]
    return lines + [line for line in test if line.startswith(RUNNERS)]


def run(session: nox.Session, django: str, *, lowest: bool = False) -> None:
    """Install Django and the requirements, and run the tests."""
    lines = [line for line in requirements(lowest=lowest) if not line.startswith("Django")]
    session.install(f"Django~={django}.0", *lines)
    session.install("--no-deps", "--editable", ".")
    options = session.posargs or ["-q", "-m", "unit or database"]
    pytest = ["pytest", "-n", "auto", "--dist", "loadgroup", *(f"tests/{room}" for room in ROOMS)]
    servers = ["tests.servers", "--workers", "2", "run", "--", "python", "-m"]
    session.run("python", "-m", *servers, *pytest, *options)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Test with the oldest versions that setup.cfg allows."""
    run(session, "5.2", lowest=True)


@nox.session
@nox.parametrize("python, django", NEWEST)
def newest(session: nox.Session, django: str) -> None:
    run(session, django)


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Build the wheel from the sdist, and use it in an empty environment."""
    folder = Path(session.create_tmp()).resolve()
    shutil.rmtree(folder)  # files of an earlier run
    folder.mkdir()
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(folder / "dist"), ".", silent=True)
    session.run("python", "-m", "venv", "--clear", str(folder / "env"))
    python, [wheel] = str(folder / "env/bin/python"), (folder / "dist").glob("*.whl")
    session.run(python, "-m", "pip", "--quiet", "install", str(wheel), external=True)
    session.chdir(folder)  # so that Python does not import from the checkout
    session.run(python, "-m", "django", "startproject", "shop", external=True)
    settings = Path("shop/shop/settings.py")
    settings.write_text(f"{settings.read_text()}\nINSTALLED_APPS += ['outbox_app']\n")
    for command in (["check"], ["migrate", "--verbosity", "0"], ["drain_outbox", "--once"]):
        session.run(python, "shop/manage.py", *command, external=True)
