"""The first two tutorials, typed: their files, commands and sessions of the shell, in their order.

The database and the broker are those of the test. Left out: the virtual environment, stopping the
broker, and the pages of the admin. Ids of processes are those of the test's, and what takes a
while in a terminal is looked at until it is there.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import environ
import pytest
from django.conf import settings
from django.db import connections

from tests import forking
from tests.patience import eventually
from tests.servers import processes

DOCS = Path(__file__).resolve().parents[2] / "docs/tutorial"
BLOCK = re.compile(r"^```([\w-]+)\n(.*?)^```$|<!--.*?-->", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)$", re.MULTILINE)
PLACES = [
    pytest.param("default", "redis_url", id="sqlite-redis"),
    pytest.param("postgres", "redis_url", id="postgres-redis"),
    pytest.param("mariadb", "rabbitmq_url", id="mariadb-rabbitmq"),
]
NOT_TYPED = ("mkdir", "python3 -m venv", "pip install", "pgrep", "python manage.py createsuperuser",
             "python manage.py runserver", "python manage.py test")  # fmt: skip
STAYS = ("celery", "python manage.py drain_outbox", "python manage.py run_subscriptions")
#: Executes one example after the other, as a shell does, in the namespace of ``manage.py shell``.
SHELL = """
import ast, contextlib, io, sys
for line in sys.stdin:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(ast.literal_eval(line), "<page>", "single"), globals())
    print(repr(output.getvalue()), flush=True)
"""


class Reader:
    """Does what a page says, in a folder of its own."""

    def __init__(self, folder: Path, database: dict[str, object], broker: str) -> None:
        self.folder, self.database, self.broker = folder, database, broker
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("DJANGO", "PYTEST")) and not key.endswith("_URL")
        }
        self.running: dict[str, forking.Popen] = {}
        self.shell: subprocess.Popen[str] | None = None

    def follow(self, page: str) -> None:
        text = (DOCS / page).read_text()
        end = (
            text.index("**The drainer, gently.**")
            if "gently.**" in text
            else text.index("## Test it")
        )
        for found in BLOCK.finditer(text, 0, end):
            language, block = found.groups()
            before = text[: found.start()].rstrip().rpartition("\n\n")[2]
            if language == "python":
                self.write(self.file_of(text[: found.start()]), block, append="ppend" in before)
            elif language == "console":
                self.type(block)
            elif language == "python-console":
                self.session(block)
            elif language == "text":
                for line in block.splitlines():
                    self.logged(line.split(" database=")[0].split(" rate=")[0])

    def file_of(self, text: str) -> str:
        return re.findall(r"`(\w+/\w+\.py)`", text)[-1]

    def write(self, name: str, block: str, *, append: bool) -> None:
        path = self.folder / name
        if name == "bakery/settings.py":
            if self.database:
                block = re.sub(r"^DATABASES.*?^}\n", "", block, flags=re.MULTILINE | re.DOTALL)
                path.write_text(
                    f"{path.read_text()}\nDATABASES = {{'default': {self.database!r}}}\n"
                )
            block = block.replace("INSTALLED_APPS = [", "INSTALLED_APPS += [")
            block = block.replace("redis://localhost:6379/0", self.broker)
            append = True
        path.write_text(f"{path.read_text()}\n\n{block}" if append else block)

    def type(self, block: str) -> None:
        said = ""
        for command in COMMAND.findall(block):
            if command.startswith(NOT_TYPED):
                continue
            if command.startswith("kill -9"):
                drainer = self.running.pop("drain_outbox")
                drainer.kill()
                drainer.wait()
            elif command == "python manage.py shell":
                self.open_shell()
            elif command.startswith(STAYS):
                self.start(command)
            else:
                said += self.run(command)
        if said:
            wanted = [line for line in block.splitlines() if not line.startswith("$ ")]
            assert all(line in said for line in wanted), said

    def arguments(self, command: str) -> list[str]:
        words = command.split()
        if words[0] == "python":
            return [sys.executable, *words[1:]]
        return [
            sys.executable,
            "-m",
            {"django-admin": "django"}.get(words[0], words[0]),
            *words[1:],
        ]

    def run(self, command: str) -> str:
        done = forking.run(
            self.arguments(command),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout + done.stderr)

    def start(self, command: str) -> None:
        name = re.findall(r"\w+", command)[-1] if "manage.py" in command else "worker"
        arguments = self.arguments(command)
        if name == "worker":
            arguments += ["--pool", "solo"]
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = forking.Popen(
                arguments, cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )

    def open_shell(self) -> None:
        self.close_shell()
        self.shell = subprocess.Popen(
            [sys.executable, "manage.py", "shell", "--verbosity", "0", "--command", SHELL],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def session(self, block: str) -> None:
        for example in doctest.DocTestParser().get_examples(block):
            if example.want:
                eventually(lambda each=example: self.says(each.source) == each.want, example.source)
            else:
                self.says(example.source)

    def says(self, source: str) -> str:
        assert self.shell
        assert self.shell.stdin
        assert self.shell.stdout
        self.shell.stdin.write(f"{source!r}\n")
        self.shell.stdin.flush()
        return str(ast.literal_eval(self.shell.stdout.readline()))

    def logged(self, words: str) -> None:
        if "drain_outbox" not in self.running:  # the page has just killed it
            self.start("python manage.py drain_outbox")
        eventually(lambda: words in (self.folder / "drain_outbox.log").read_text(), words)

    def close_shell(self) -> None:
        if self.shell:
            self.shell.communicate()

    def close(self) -> None:
        self.close_shell()
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process in self.running.values():
            processes.kill_trees([process.pid])
            process.wait()


@pytest.fixture
def database(request: pytest.FixtureRequest, django_db_blocker):
    """A new database on the server of the alias, as Django's settings have it; none for SQLite."""
    alias = request.param
    if alias == "default":
        yield {}
        return
    if alias not in settings.DATABASES:
        pytest.skip(f"no {alias}")
    url = environ.Env.db_url_config(os.environ[f"{alias.upper()}_URL"])
    name = f"bakery_{uuid4().hex[:8]}"
    connection = connections[alias]
    with django_db_blocker.unblock(), connection._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        yield {**url, "NAME": name}
        cursor.execute(f"DROP DATABASE {name}")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("database", "broker"), PLACES, indirect=["database"])
def test_a_stranger_gets_there(tmp_path, database, broker, request):
    reader = Reader(tmp_path, database, request.getfixturevalue(broker))
    try:
        reader.follow("first-outbox.md")
        reader.follow("events.md")
    finally:
        reader.close()
