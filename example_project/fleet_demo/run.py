"""The demo from the first migration to the last count, in the order in which it happens.

Servers and callers are processes of their own. Every wait is bounded.
"""

import os
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack

from django.conf import settings
from django.core.management import call_command
from django.db import connection, transaction

from example_project.demo.terminal import Progress
from example_project.processes import MANAGE, Child, stop
from outbox_app.fleet.topology import live_servers

from .callers import DESKS, Callers
from .counting import SEATS, Count, picture
from .models import Desk, Show

#: Seconds after which the demo gives up waiting for the servers.
PATIENCE = 60.0
#: Weights of the servers.
WEIGHTS = {"server-1": 100, "server-2": 100, "server-3": 100, "server-4": 50}
SERVERS = list(WEIGHTS)
HOT = "hamlet"
LOGS = settings.DATA_DIR / "logs"


class FailedError(Exception):
    """The demo could not be carried out."""


def run(calls):
    """Carry out the demo; return the exit code."""
    demo = Demo(calls)
    try:
        try:
            demo.run()
        finally:
            demo.go_on()
            stop(demo.started)
    except FailedError as failure:
        show_logs()
        print(f"\nFAILED: {failure}")
        return 1
    count = Count(demo.stages, SERVERS)
    print(f"\n{count.table()}\n")
    if not count.passed:
        show_logs()
        print("FAILED: not each call that fails over was answered, once.")
        return 1
    print("Each call that fails over was answered, and each seat was sold once.")
    return 0


def show_logs():
    """Write the end of every log to standard error."""
    for path in sorted(LOGS.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)


def free_ports(count):
    """Return ports that are free now, as texts."""
    with ExitStack() as all:
        found = [all.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(each.getsockname()[1]) for each in found]


def live_nodes():
    """Return the process ids of the servers that are registered, as texts."""
    return {each.node.rpartition(":")[2] for each in live_servers(using="default")}


class Demo:
    """The processes of one run, and the calls of each stage."""

    def __init__(self, calls):
        self.calls = calls
        self.progress = Progress()
        self.ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        #: The process of each server, and all that were started.
        self.servers, self.started = {}, []
        self.stopped = None
        self.stages = {}

    def run(self):
        call_command("migrate", verbosity=0)
        for number in range(DESKS):
            Desk.execute(f"desk-{number}", "open", {"seats": SEATS}, command_id="open")
        Show.execute(HOT, "open", {"seats": SEATS}, command_id="open")
        self._start(*SERVERS)
        self._balanced()
        self._failing()
        self._hot()

    def go_on(self):
        """Continue the server that was stopped."""
        if self.stopped is not None:
            os.kill(self.stopped.pid, signal.SIGCONT)
            self.stopped = None

    def _balanced(self):
        self.progress.say("Calls that are balanced three ways; server-4 has half the weight.")
        for balance in ("random", "round_robin", "weighted_random"):
            self._call({balance: {"balance": balance}})

    def _failing(self):
        self.progress.say("server-2 is killed, while callers are at work.")
        killed = self._both("killed", self.servers["server-2"].kill)
        for name, called in killed.items():
            print(f"{name}, who answered (x: an error):\n{picture(called, SERVERS)}")
        self._start("server-2")
        self.progress.say("server-3 is stopped with SIGSTOP: it takes calls, and never answers.")
        self._both("stopped", lambda: self._stop("server-3"))
        self.go_on()

    def _hot(self):
        self.progress.say(f"Everybody wants to see {HOT}: its leader gets the commands.")
        [called] = self._call({"one hot entity": {"show": HOT}}).values()
        leader, count = Counter(each.server for each in called).most_common(1)[0]
        self.progress.say(f"{leader} leads it, and has executed {count} of {len(called)}.")
        self.progress.say(f"{leader} is killed.")
        killing = {"one hot entity, leader killed": {"show": HOT}}
        [called] = self._call(killing, self.servers[leader].kill).values()
        print(f"Who has executed:\n{picture(called, SERVERS)}")
        node = str(self.servers[leader].pid)
        self._wait(lambda: node not in live_nodes(), f"the end of the lease of {leader}")
        self.progress.say(f"The registry has {leader} no more.")
        self._call({"one hot entity, afterwards": {"show": HOT}})

    def _both(self, what, happens):
        """Run callers that fail over beside callers that do not."""
        return self._call(
            {
                f"one {what}, fail-fast": {"cluster": "fail_fast", "balance": "round_robin"},
                f"one {what}, fail-over": {"cluster": "fail_over", "balance": "round_robin"},
            },
            happens,
        )

    def _call(self, choices, happens=None):
        connection.close()  # the forks below must not share this process's connection
        callers = {name: Callers(self.calls, **given) for name, given in choices.items()}
        if happens:
            for each in callers.values():
                each.wait_for(self.calls // 4)
            happens()
            for each in callers.values():
                each.wait_for(self.calls // 2)
        for each in callers.values():
            each.enough()
        try:
            found = {name: each.result() for name, each in callers.items()}
        except RuntimeError as error:
            raise FailedError(error) from error
        self.stages |= found
        return found

    def _start(self, *names):
        for name in names:
            given = {"SERVER": name, "PORT": self.ports[name], "WEIGHT": str(WEIGHTS[name])}
            command = [*MANAGE, "runserver", "--noreload", self.ports[name]]
            log = LOGS / f"{name}-{len(self.started)}.log"
            self.servers[name] = Child(name, command, log=log, environment=given)
            self.started.append(self.servers[name])
        nodes = {str(self.servers[name].pid) for name in names}
        self._wait(lambda: nodes <= live_nodes(), ", ".join(names))
        self.progress.say(f"{', '.join(names)}: registered.")

    def _wait(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise FailedError(f"{PATIENCE:.0f} s were not enough for {what}.")
            time.sleep(0.05)

    def _stop(self, name):
        # The transaction locks SQLite: a server stopped while it writes would block all the others.
        with transaction.atomic():
            self.stopped = self.servers[name]
            os.kill(self.stopped.pid, signal.SIGSTOP)
            os.waitpid(self.stopped.pid, os.WUNTRACED)  # until each of its threads has stopped
