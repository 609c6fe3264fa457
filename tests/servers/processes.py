"""Process trees, and a guard that ends them when the process that started them has ended.

All functions work by process id, never by name. ``spawn`` registers a child with the guard, a small
separate process that reads a pipe from us. The pipe closes when we end, even by SIGKILL. Then the
guard ends the registered processes with their descendants, and removes the registered folders.

PR_SET_PDEATHSIG would not be enough: it fires when the *thread* that started the child ends, a
change of user clears it, it does not reach grandchildren, and a stopped server ignores every signal
but SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_IPC_RMID = 0


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended. A zombie has ended."""
    return pid in _running_processes()


def process_tree(pid: int) -> list[int]:
    """Return the process and its descendants, parents first, or nothing if it is not running."""
    parents = _running_processes()
    tree = [pid] if pid in parents else []
    for parent in tree:
        tree += [child for child, its_parent in parents.items() if its_parent == parent]
    return tree


def stop_tree(pid: int) -> list[int]:
    """Send SIGSTOP to the whole tree. Returns its process ids."""
    stopped: list[int] = []
    # A process can fork until its signal arrives, so repeat until no new process appears.
    while new := [member for member in process_tree(pid) if member not in stopped]:
        _send(new, signal.SIGSTOP)
        _wait_until(lambda: all(map(_is_still, new)), timeout=30)
        stopped += new
    return stopped


def continue_tree(pid: int) -> None:
    _send(reversed(process_tree(pid)), signal.SIGCONT)


def kill_trees(pids: Iterable[int]) -> None:
    """Send SIGKILL to whole trees, and wait until they have ended."""
    # Stop all processes first, so that none reacts to the end of another by starting new ones.
    members = [member for pid in pids for member in stop_tree(pid)]
    _send(members, signal.SIGKILL)
    wait_for_end(members, timeout=30)
    _remove_shared_memory(members)


def wait_for_end(pids: Sequence[int], timeout: float) -> bool:
    return _wait_until(lambda: _running_processes().keys().isdisjoint(pids), timeout)


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    environment: Mapping[str, str],
    user: str | None,
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
) -> subprocess.Popen[bytes]:
    """Start a guarded process in its own session, so that Ctrl-C does not reach it."""
    with log.open("ab") as output:
        process = popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            user=user,
            group=user and _group_of(user),
            extra_groups=[] if user else None,
        )
    guard_process(process.pid)
    return process


def guard_process(pid: int, *, gently: bool = False) -> None:
    """Let the guard end the process. ``gently``: with SIGTERM first, and before the others."""
    _guard.tell("process", str(pid), _start_time(pid), "gently" if gently else "")


def forget_process(pid: int) -> None:
    """Unregister a process. Call this after wait(), when the system may use its id again."""
    _guard.tell("ended", str(pid))


def guard_folder(folder: Path) -> None:
    _guard.tell("folder", str(folder))


class _Guard:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def tell(self, *words: str) -> None:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write("\t".join(words).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                self._process.wait()


_guard = _Guard()
atexit.register(_guard.end)


def _guard_until_parent_ends() -> None:
    processes: dict[int, list[str]] = {}
    folders: list[str] = []
    for line in sys.stdin:
        kind, word, *details = line.rstrip("\n").split("\t")
        if kind == "process":
            processes[int(word)] = details
        elif kind == "ended":
            processes.pop(int(word), None)
        elif kind == "folder":
            folders.append(word)
    # If the start time differs, our process has ended, and another process has its id now.
    ours = [pid for pid, (start_time, _) in processes.items() if _start_time(pid) == start_time]
    gentle = [pid for pid in ours if processes[pid][1] == "gently"]
    gentle_trees = [member for pid in gentle for member in process_tree(pid)]
    _send(gentle, signal.SIGTERM)
    wait_for_end(gentle_trees, timeout=3)
    kill_trees([*gentle_trees, *ours])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_shared_memory(pids: Sequence[int]) -> None:
    """Remove the System V segments that killed processes (PostgreSQL) have left behind."""
    table = Path("/proc/sysvipc/shm")
    rows = table.read_text().splitlines() if table.exists() else ["key shmid cpid nattch"]
    names = rows[0].split()
    for row in rows[1:]:
        segment = dict(zip(names, map(int, row.split()), strict=False))
        if segment["cpid"] in pids and segment["nattch"] == 0:
            ctypes.CDLL(None).shmctl(segment["shmid"], _IPC_RMID, None)


def _send(pids: Iterable[int], signal_number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_still(pid: int) -> bool:
    """Return whether no thread of a process runs: all are stopped, or the process has ended."""
    return all(state in "TtZX" for state, _ in _states(f"/proc/{pid}/task").values())


def _running_processes() -> dict[int, int]:
    """Return the parent id of each running process, by process id."""
    return {pid: parent for pid, (state, parent) in _states("/proc").items() if state not in "ZX"}


def _states(folder: str) -> dict[int, tuple[str, int]]:
    """Return state and parent id of each process in ``/proc``, or thread in ``/proc/PID/task``."""
    states = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in filter(str.isdigit, os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"{folder}/{entry}/stat", "rb") as stat:
                    # The name in parentheses may itself contain blanks and parentheses.
                    state, parent = stat.read().rpartition(b")")[2].split()[:2]
                states[int(entry)] = (state.decode(), int(parent))
    return states


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    _guard_until_parent_ends()
