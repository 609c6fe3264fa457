"""Forked processes can be signalled, watched and ended like those of ``subprocess``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import forking
from tests.patience import patience

pytestmark = pytest.mark.system
SLEEP = "import time; print('sleeps', flush=True); time.sleep(600)"
both = pytest.mark.parametrize("kind", [forking, subprocess], ids=["forking", "subprocess"])


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


@both
@pytest.mark.parametrize(
    ("code", "ends"),
    [("pass", 0), ("import sys; sys.exit(3)", 3), ("import sys; sys.exit('no')", 1), ("1/0", 1)],
)
def test_it_ends(kind, code, ends):
    done = kind.run(python(code), capture_output=True, text=True)
    assert done.returncode == ends
    assert ("no" in done.stderr) == ("no" in code)
    assert ("ZeroDivisionError" in done.stderr) == ("1/0" in code)


@both
def test_it_has_what_it_was_given(kind, tmp_path):
    code = "import os, sys; print(os.getcwd(), dict(os.environ), sys.argv, input())"
    with (tmp_path / "in").open("w+") as given:
        given.write("said")
        given.seek(0)
        done = kind.run(
            python(code, "x"),
            cwd=tmp_path,
            env={"ONLY": "this", "LC_CTYPE": "C.UTF-8"},
            stdin=given,
            capture_output=True,
            text=True,
        )
    told = {"ONLY": "this", "LC_CTYPE": "C.UTF-8"}
    assert done.stdout == f"{tmp_path} {told} ['-c', 'x'] said\n", done.stderr


@both
def test_it_is_killed(kind):
    with kind.Popen(python(SLEEP), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "sleeps\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(patience()) == process.poll() == -signal.SIGKILL


@both
def test_threads_and_what_was_registered_go_on_to_the_end(kind):
    code = (
        "import atexit, threading, time; atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"
    )
    done = kind.run(python(code), capture_output=True, text=True)
    assert done.stdout.split() == ["thread", "last"]


def test_libraries_are_loaded_and_what_is_tested_is_not():
    code = "import sys; print('django' in sys.modules, [m for m in sys.modules if 'outbox' in m])"
    done = forking.run(python(code), capture_output=True, text=True)
    assert done.stdout.startswith("True ")
    assert "outbox_app." not in done.stdout


def test_the_one_that_forks_may_die():
    process = forking._server().process
    process.kill()
    process.wait()
    assert forking.run(python("pass")).returncode == 0


def test_it_ends_with_its_owner_whoever_else_has_its_socket():
    code = (
        "import os, sys, time; sys.path.insert(0, '.')\n"
        "from tests import forking\n"
        "forking.run([sys.executable, '-c', 'pass'])\n"
        "print(forking._server().process.pid, flush=True)\n"
        "kept = forking._server().socket.fileno()\n"
        "if not os.fork():\n"
        "    os.closerange(0, kept)\n"
        "    os.closerange(kept + 1, 256)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen(
        python(code), cwd=forking.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        try:
            pid = int(owner.stdout.readline())
            assert owner.wait(patience()) == 0
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)
