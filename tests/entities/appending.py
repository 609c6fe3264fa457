"""Processes that append to the lists of a few entities, and are killed: for ``test_history``.

``python -m tests.entities.appending ALIAS COUNT LOG`` forks four of them. Each asks its commands
by threads and by coroutines, until all are answered; a command whose answer does not come is asked
again with its id. One that is killed, by itself at one of the points of a batch, is forked anew and
asks all of its commands again; one is stopped for a while, with what it has locked. Each answer is
a line of the log, written when the caller has it. With ``hot`` for a fourth argument nothing is
killed or stopped, and each command has a coroutine of its own, all of them on one list.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import django

PROCESSES, COROUTINES, THREADS = 4, 12, 4
POINTS = ("loaded", "handled", "written", "committed", "answered")
#: A process is killed so many times at most.
KILLS = 3
#: A process is stopped once, for so many seconds: longer than callers wait.
STOPS, STOPPED, TIMEOUT = 3, 2.0, 1.0


def lists(count: int) -> int:
    """Return how many lists so many commands append to: each version has all of its list."""
    return max(3, count // 500)


def commands(
    process: int, count: int, *, entities: int | None = None
) -> Iterator[tuple[str, str, int]]:
    """Return entity, command id and item of what a process asks."""
    entities = entities or lists(count)
    for number in range(process, count, PROCESSES):
        yield f"list-{number % entities}", f"c{number}", number


def main(alias: str, count: int, log: str, kind: str = "") -> None:
    django.setup()
    kills = dict.fromkeys(range(PROCESSES), 0)
    work = _work_hot if kind == "hot" else _work
    running = {
        _fork(work, process, alias, count, log, kills=0): process for process in range(PROCESSES)
    }
    while running:
        pid, status = os.wait()
        process = running.pop(pid)
        if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
            kills[process] += 1
            again = _fork(work, process, alias, count, log, kills=kills[process])
            running[again] = process
        elif status:
            sys.exit(f"process {process} ended with {status}")


def _fork(work: Any, process: int, alias: str, count: int, log: str, *, kills: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(process, alias, count, log, kills)
        code = 0
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _work(process: int, alias: str, count: int, log: str, kills: int) -> None:
    from django.db import connections

    from outbox_app.failpoints import set_failpoint
    from tests.entities.models import Account

    Account.timeout = TIMEOUT
    if kills < KILLS:
        point = POINTS[(process + PROCESSES * kills) % len(POINTS)]
        left = [3 + process + 5 * kills]

        def kill() -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        set_failpoint(f"entity_{point}", kill)
    if process == STOPS and not kills:
        set_failpoint("entity_written", lambda: _stop(f"{log}.stopped"))
    answers = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    todo = list(commands(process, count))
    half = len(todo) // 2

    def in_thread(some: Sequence[Any]) -> None:
        for each in some:
            while not _ask(answers, *each, alias=alias):
                pass
        connections.close_all()

    async def in_loop() -> None:
        async def ask(some: Sequence[Any]) -> None:
            for each in some:
                while not await _aask(answers, *each, alias=alias):
                    pass

        await asyncio.gather(*(ask(todo[half + n :: COROUTINES]) for n in range(COROUTINES)))

    with ThreadPoolExecutor(THREADS) as pool:
        asked = [pool.submit(in_thread, todo[:half][n::THREADS]) for n in range(THREADS)]
        asyncio.run(in_loop())
        for each in asked:
            each.result()


def _work_hot(process: int, alias: str, count: int, log: str, kills: int) -> None:
    answers = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    async def ask(each: tuple[str, str, int]) -> None:
        while not await _aask(answers, *each, alias=alias):
            pass

    async def in_loop() -> None:
        await asyncio.gather(*map(ask, commands(process, count, entities=1)))

    asyncio.run(in_loop())


def _stop(note: str) -> None:
    """Stop this process once, until a child of its own continues it."""
    from outbox_app.failpoints import set_failpoint

    set_failpoint("entity_written", None)
    Path(note).touch()
    stopped = os.getpid()
    if not os.fork():
        time.sleep(STOPPED)
        os.kill(stopped, signal.SIGCONT)
        os._exit(0)
    os.kill(stopped, signal.SIGSTOP)


def _ask(answers: int, id: str, command_id: str, item: int, *, alias: str) -> bool:
    from tests.entities.models import Account

    try:
        options = {"command_id": command_id, "using": alias}
        outcome = Account.execute(id, "enlist", {"item": item}, **options)  # type: ignore[arg-type]
    except Exception as error:
        return _again(error)
    return _note(answers, id, command_id, outcome)


async def _aask(answers: int, id: str, command_id: str, item: int, *, alias: str) -> bool:
    from tests.entities.models import Account

    try:
        options = {"command_id": command_id, "using": alias}
        outcome = await Account.aexecute(id, "enlist", {"item": item}, **options)  # type: ignore[arg-type]
    except Exception as error:
        return _again(error)
    return _note(answers, id, command_id, outcome)


def _again(error: Exception) -> bool:
    from django.db import InterfaceError, OperationalError

    from outbox_app.entities.exceptions import CommandTimeout, EntityContended, OutcomeUnknown

    lost = InterfaceError, OperationalError, CommandTimeout, EntityContended, OutcomeUnknown
    if not isinstance(error, lost):
        raise error
    return False


def _note(answers: int, id: str, command_id: str, outcome: Any) -> bool:
    code = outcome.rejected and outcome.rejected.code
    line = json.dumps([id, command_id, outcome.version, outcome.response, code])
    os.write(answers, line.encode() + b"\n")
    return True


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
