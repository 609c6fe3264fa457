"""The example of the how-to on the fleet works as it stands: files, commands, calls, a kill."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forking
from tests.patience import eventually
from tests.servers import free_port
from tests.servers.processes import kill_trees, spawn

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/fleet.md").read_text()
SECTION = PAGE.partition("## Try it\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r"^```(console|python|python-console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w/]+\.py|gunicorn\.conf\.py)`")
PORTS = ("8001", "8002")
NOT_TYPED = ("pip install", "export ")
#: Executes a session in ``manage.py shell``.
SHELL = """
import doctest, sys
test = doctest.DocTestParser().get_doctest({session!r}, {{}}, "page", None, None)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed)
"""


class Reader:
    """Does what the section says, in a folder of its own, with two free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, {port: str(free_port()) for port in PORTS}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.defined = ""  # in the shell
        self.environment = {
            **{name: value for name, value in os.environ.items() if "DJANGO" not in name},
            "PYTHONPATH": f"{folder}:{ROOT}",
            "WEBSITE_SECRET": "0" * 64,
        }

    def follow(self) -> None:
        for found in BLOCK.finditer(SECTION):
            language, block = found.groups()
            for port, own in self.ports.items():
                block = block.replace(port, own)
            before = SECTION[: found.start()]
            if language == "console":
                self.type(block)
            elif language == "python":
                path = self.folder / FILE.findall(before)[-1]
                mode = "a" if path.name == "settings.py" else "w"
                with path.open(mode) as file:
                    file.write(block)
            else:
                self.session(block)

    def type(self, block: str) -> None:
        for command in re.findall(r"^\$ (.*)$", block, re.MULTILINE):
            if command.startswith(NOT_TYPED):
                continue
            if command.startswith("kill -9"):
                self.kill(command.rpartition(":")[2].rstrip("')"))
            elif command.endswith("&"):
                self.start(command.removesuffix("&"))
            elif command.endswith("outbox_fleet servers"):
                self.listed(2)
            else:
                done = self.run(command)
                assert done.returncode == 0, done.stdout + done.stderr

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        program, *words = shlex.split(command)
        module = ["-m", "django"] if program == "django-admin" else []
        return forking.run(
            [sys.executable, *module, *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def start(self, command: str) -> None:
        variable, *words = shlex.split(command)
        name, _, value = variable.partition("=")
        port = words[words.index("--bind") + 1].rpartition(":")[2]
        self.servers[port] = spawn(
            [sys.executable, "-m", *words],
            log=self.folder / f"{port}.log",
            folder=self.folder,
            environment={**self.environment, name: value},
            user=None,
            popen=subprocess.Popen,
        )

    def kill(self, port: str) -> None:
        server = self.servers.pop(port)
        kill_trees([server.pid])
        server.wait()

    def listed(self, number: int) -> None:
        command = "python manage.py outbox_fleet servers"
        eventually(lambda: f"shop: {number} registered" in self.run(command).stdout, command)

    def session(self, block: str) -> None:
        """Which server answers is chance: any of the two may."""
        session = self.defined + re.sub(r"(http://127.0.0.1:)\d+", r"\1...", block)
        shell = shlex.quote(SHELL.format(session=session))
        done = self.run(f"python manage.py shell --settings shop.website --command {shell}")
        assert done.returncode == 0, done.stdout + done.stderr
        self.defined = block.partition(">>> call(")[0]

    def close(self) -> None:
        for port in list(self.servers):
            self.kill(port)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.slow
def test_calls_succeed_before_and_after_a_server_is_killed(reader: Reader) -> None:
    reader.follow()
    assert len(reader.servers) == 1
    assert len(doctest.DocTestParser().get_examples(SECTION)) == 7
    reader.listed(1)
