"""The tutorials, typed: their files, commands and sessions of the shell, in their order.

The database and the broker are the test's. The chapter on Spark starts Spark five times, so it runs
on SQLite only, unless ``ALL_DATABASES=1``. The tests leave out the virtual environment, stopping
the broker, and the pages of the admin. They replace process ids, days and seconds by their own, and
wait for output that takes a while in a terminal.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

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
#: Each chapter, and where its reader stops.
CHAPTERS = {
    "first-outbox.md": "**The drainer, gently.**",
    "events.md": "## Test it",
    "entities.md": "## What happens to it",
    "pipeline.md": "Next: [",
}
#: The file, or the shell, that a block of code belongs to.
PLACE = re.compile(r"`((?:\w+/)+\w+\.py|python manage\.py shell)`")
NOT_TYPED = ("mkdir", "python3 -m venv", "pip install", "pgrep", "java -version",
             "python manage.py createsuperuser", "python manage.py runserver")  # fmt: skip
STAYS = ("celery", "python manage.py drain_outbox", "python manage.py run_subscriptions")
#: A row that counts something on a day: what, and how many.
COUNTED = re.compile(r"^\d{4}-\d\d-\d\d( .* )(\d+)$", re.MULTILINE)
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
        self.code = 0  # of the last command

    def follow(self, page: str) -> None:
        text = (DOCS / page).read_text()
        read = 0
        for found in BLOCK.finditer(text, 0, text.index(CHAPTERS[page])):
            language, block = found.groups()
            said, read = text[read : found.start()], found.end()
            for line in re.findall(r"`(INSTALLED_APPS \+= \[.*?\])`", said):
                self.write("bakery/settings.py", line, append=True)
            if "`python manage.py shell`" in said:
                self.open_shell()
            if language == "python":
                place = PLACE.findall(text[: found.start()])[-1]
                if place.endswith(" shell"):
                    for statement in ast.parse(block).body:
                        self.says(f"{ast.get_source_segment(block, statement)}\n")
                else:
                    before = text[: found.start()].rstrip().rpartition("\n\n")[2]
                    self.write(place, block, append="ppend" in before)
            elif language == "console":
                self.type(block)
            elif language == "python-console":
                self.session(block)
            elif language == "text":
                for line in block.splitlines():
                    self.logged(line.split(" database=")[0].split(" rate=")[0])

    def write(self, name: str, block: str, *, append: bool) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
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
            elif command == "echo $?":
                assert f"\n{self.code}\n" in block
            else:
                said += self.run(command)
                assert bool(self.code) == ("CommandError" in block), said
        if said:
            wanted = [
                line for line in block.partition("$ echo")[0].splitlines() if line[:2] != "$ "
            ]
            days = in_one_day(said)
            assert [line for line in wanted if not re.search(pattern(line), days)] == [], said

    def arguments(self, command: str) -> list[str]:
        first, *words = shlex.split(command)
        if first == "find":
            return [first, *words]
        module = {"python": [], "django-admin": ["-m", "django"]}.get(first, ["-m", first])
        return [sys.executable, *module, *words]

    def run(self, command: str) -> str:
        done = forking.run(
            self.arguments(command),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        self.code = done.returncode
        return str(done.stdout + done.stderr)

    def start(self, command: str) -> None:
        name = re.findall(r"\w+", command)[-1] if "manage.py" in command else "worker"
        self.stop(name)  # the one of the last chapter
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

    def stop(self, name: str) -> None:
        if process := self.running.pop(name, None):
            process.send_signal(signal.SIGTERM)
            processes.kill_trees([process.pid])
            process.wait()

    def close(self) -> None:
        self.close_shell()
        for name in list(self.running):
            self.stop(name)


def pattern(line: str) -> str:
    """A line of a page as an expression: its dots, seconds, days and names of files are any."""
    line = re.sub(r"\d{4}(-\d\d){2}|/[\w-]+….parquet|(?<=seconds=)[\d.]+", "…", line)
    return re.escape(line).replace("…", ".*")


def in_one_day(said: str) -> str:
    """What was said, the counts of two days added up: midnight may pass while a page is read."""
    counts: Counter[str] = Counter()
    for what, count in COUNTED.findall(said):
        counts[what] += int(count)
    return COUNTED.sub(lambda row: f"{row[0][:10]}{row[1]}{counts[row[1]]}", said)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("new_database", "broker"), PLACES, indirect=["new_database"])
def test_a_stranger_gets_there(tmp_path, new_database, broker, request):
    reader = Reader(tmp_path, new_database, request.getfixturevalue(broker))
    try:
        for page in CHAPTERS:
            if page != "pipeline.md" or not new_database or os.environ.get("ALL_DATABASES"):
                reader.follow(page)
        receipt, log = "Receipt: 5 from ann", tmp_path / "worker.log"
        eventually(lambda: receipt in log.read_text(), receipt)
        assert log.read_text().count(receipt) == 1
    finally:
        reader.close()
