"""Callers: processes that book seats, and note which server has answered each call.

A process of callers is a fork of the demo with four threads; it finds the servers by itself.
"""

import itertools
import json
import os
import select
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from uuid import uuid4

from outbox_app.entities import service
from outbox_app.exceptions import OutboxError

THREADS = 4
#: How many desks the calls are spread over.
DESKS = 8


class Called(NamedTuple):
    """A command, the server that has executed it, and whether its caller saw an error."""

    type: str
    id: str
    command_id: str
    server: str
    error: str


class Callers:
    """A process that makes at least so many calls, and goes on until enough() is called."""

    def __init__(self, calls, *, show="", **choices):
        self.calls, self.show, self.choices = calls, show, choices
        (self._read, self._write), (self._told, self._tell) = os.pipe(), os.pipe()
        self._parent, self.pid = os.getpid(), os.fork()
        if not self.pid:
            status = 1
            try:
                self._run()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(self._write)
        self._lines, self._found = os.fdopen(self._read), []

    def wait_for(self, calls):
        """Wait for the answers to so many more calls."""
        wanted = len(self._found) + calls
        while len(self._found) < wanted and (line := self._lines.readline()):
            self._found.append(Called(*json.loads(line)))

    def enough(self):
        """Tell the process that it may end."""
        os.write(self._tell, b".")

    def result(self):
        """Wait for the process to end; return its calls, in the order of their answers."""
        self.wait_for(float("inf"))
        self._lines.close()
        if os.waitpid(self.pid, 0)[1]:
            raise RuntimeError(f"the callers have ended after {len(self._found)} calls")
        return self._found

    def _run(self):
        tickets = service("tickets", **self.choices)
        numbers, lock = itertools.count(), threading.Lock()
        with os.fdopen(self._write, "w") as lines, ThreadPoolExecutor(THREADS) as pool:

            def book():
                while (number := next(numbers)) < self.calls or not self._is_enough():
                    called = self._book(tickets, number)
                    with lock:
                        print(json.dumps(called), file=lines, flush=True)

            for each in [pool.submit(book) for _ in range(THREADS)]:
                each.result()

    def _is_enough(self):
        is_alone = os.getppid() != self._parent
        return is_alone or bool(select.select([self._told], [], [], 0)[0])

    def _book(self, tickets, number):
        type, id = ("show", self.show) if self.show else ("desk", f"desk-{number % DESKS}")
        command_id = str(uuid4())
        try:
            said = tickets.execute(f"fleet_demo.{type}", id, "book", command_id=command_id)
        except OutboxError as error:
            return Called(type, id, command_id, "", repr(error))
        return Called(type, id, command_id, said.response["server"], "")
