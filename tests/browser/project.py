"""The example project as processes of their own, and a way to ask its database.

``Project`` runs ``example_project.up``: web server, drainer, subscriptions and worker. What a test
wants to know or to change in the database is a function of ``data``, which ``ask`` runs in one more
process with the project's settings: the settings of the tests know nothing of the project.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.patience import patience
from tests.servers import processes
from tests.servers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
#: Variables of the developer's own that must not reach the project.
FOREIGN = ("DATABASE_URL", "BROKER_URL", "LEASE_SECONDS", "DEBUG", "SECRET_KEY", "ALLOWED_HOSTS")
SECONDS_TO_START = 120


class Project:
    """The running example.

    Args:
        folder: Where it keeps its database, its broker and its log.
        variables: Its environment besides, for example ``DATABASE_URL``.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        self.log = folder / "up.log"
        self.address = ""
        self.variables = {
            "DJANGO_SETTINGS_MODULE": "tests.browser.settings",
            "DATA_DIR": str(folder / "data"),
            "PYTHONPATH": str(ROOT),
            **(variables or {}),
        }
        # Not forked: this process has threads, and a Django with other settings.
        self._asked = ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_set_up,
            initargs=(self.variables,),
        )
        self._up: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def ask(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what a function says that runs with the project's settings."""
        return self._asked.submit(function, *arguments, **options).result()

    def start(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        with self.log.open("wb") as log:
            self._up = subprocess.Popen(
                [sys.executable, "-m", "example_project.up", "--address", self.address],
                cwd=ROOT,
                env={**kept, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        processes.guard_process(self._up.pid, gently=True)  # it may outlive a worker of pytest
        deadline = time.monotonic() + patience(SECONDS_TO_START)
        while not self._answers():
            if self._up.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The project does not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._up and self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
            try:
                self._up.wait(patience(60))  # it kills what does not end
            except subprocess.TimeoutExpired:
                self._up.kill()
                self._up.wait()
            processes.forget_process(self._up.pid)
        self._asked.shutdown()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=5)
        try:
            connection.request("GET", "/admin/login/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _set_up(variables: Mapping[str, str]) -> None:
    # Ctrl-C reaches this process too; the one that asks decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(variables)
    import django

    django.setup()
