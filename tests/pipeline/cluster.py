"""A standalone cluster of Spark, of what pip installs: a master and workers, each a process.

A worker is as much of a machine as one machine can hold several of: it has folders of its own, the
package as its wheel installs it, not in the driver's folder, and is killed with all it has started.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark

from tests.faults.tools import ROOT
from tests.patience import eventually
from tests.servers import processes

from . import classes

#: What the wheel is made of.
_SOURCES = ("LICENSE", "README.md", "pyproject.toml", "pyspark_outbox.py", "setup.cfg")

Process = subprocess.Popen[bytes]


class Cluster:
    """A master and two workers of a core each, on the loopback interface.

    Args:
        folder: Where everything of it lies.
        environment: Variables of all its processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.packages = folder / "packages"
        #: What a rebuild needs on executors, too. The package does not lie beside it.
        self.project = folder / "project"
        bin = Path(sys.executable).parent
        self.environment = {
            **environment,
            "PATH": f"{bin}:{environment['PATH']}",
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
            # They start sooner.
            "JDK_JAVA_OPTIONS": classes.options(),
        }
        self.workers: list[Process] = []
        self._started: list[tuple[Process, Path]] = []

    def __enter__(self) -> Cluster:
        self.project.mkdir(parents=True)
        for name in ("manage.py", "tests"):
            (self.project / name).symlink_to(ROOT / name)
        try:
            master = self._start("master.Master")
            self._install()
            self.url = self._says(master, r"Starting Spark master at (spark://\S+)")
            self._says(master, "(New state: ALIVE)")
            for _ in range(2):
                self.start_worker()
            for worker in self.workers:
                self._says(worker, "(Successfully registered with master)")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        processes.kill_trees([each.pid for each, _ in self._started if each.poll() is None])
        for each, _ in self._started:
            each.wait()
            processes.forget_process(each.pid)

    def start_worker(self) -> None:
        """Start one more. It registers by itself."""
        own = self.folder / f"worker-{len(self.workers)}"
        temporary = own / "temporary"
        temporary.mkdir(parents=True)
        limits = ("--cores", "1", "--memory", "700m", "--work-dir", str(own / "applications"))
        worker = self._start(
            "worker.Worker",
            *limits,
            self.url,
            PYTHONPATH=f"{self.packages}:{self.project}",
            TMPDIR=str(temporary),
            SPARK_LOCAL_DIRS=str(temporary),
        )
        self.workers.append(worker)

    def kill(self, worker: Process) -> None:
        """Kill a worker with its executors, as if its machine was lost."""
        processes.kill_trees([worker.pid])

    def hang(self, worker: Process) -> list[int]:
        """Stop the executors of a worker, which itself goes on. Returns their processes."""
        tree = processes.process_tree(worker.pid)
        found = [pid for pid in tree if b"CoarseGrainedExecutor" in _proc(pid, "cmdline")]
        return [each for pid in found for each in processes.stop_tree(pid)]

    def stopped(self, process: Process) -> list[int]:
        """Return the processes of a tree that a signal has stopped."""
        tree = processes.process_tree(process.pid)
        return [pid for pid in tree if _proc(pid, "stat").rpartition(b")")[2][:2] == b" T"]

    def run(self, command: str, **variables: str) -> Process:
        """Type a command where the driver is: in the folder of ``manage.py``."""
        return self._spawn(["bash", "-c", command], self.project, **variables)

    def output(self, process: Process) -> str:
        """Return what a process has written so far."""
        return dict(self._started)[process].read_text()

    def executors(self) -> set[Path]:
        """Return the folders of all executors that there have been."""
        return set(self.folder.glob("worker-*/applications/app-*/*"))

    def _install(self) -> None:
        source = self.folder / "source"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "outbox_app", source / "outbox_app", ignore=ignored)
        for name in _SOURCES:
            shutil.copy(ROOT / name, source)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        pip += ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(self.packages)]
        subprocess.run([*pip, str(source)], check=True, capture_output=True)

    def _start(self, name: str, *arguments: str, **variables: str) -> Process:
        program = f"{self.environment['SPARK_HOME']}/bin/spark-class"
        command = [program, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        command += ["--port", "0", "--webui-port", "0", *arguments]
        return self._spawn(command, self.folder, **variables)

    def _spawn(self, command: list[str], folder: Path, **variables: str) -> Process:
        log = self.folder / f"process-{len(self._started)}.log"
        environment = {**self.environment, **variables}
        process = processes.spawn(
            command, log=log, folder=folder, environment=environment, user=None
        )
        self._started.append((process, log))
        return process

    def _says(self, process: Process, pattern: str) -> str:
        def said() -> re.Match[str] | None:
            assert process.poll() is None, self.output(process)
            return re.search(pattern, self.output(process))

        found: re.Match[str] = eventually(said, pattern)
        return found[1]


def _proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return b""
