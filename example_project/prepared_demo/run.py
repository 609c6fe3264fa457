"""The demo from the first migration to the last count, in the order in which it happens.

The web servers of both projects, the shop's check-back and each payment are separate processes.
Every wait is bounded.
"""

import os
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial

from django.conf import settings
from django.core.management import call_command

from example_project.demo.terminal import Progress
from example_project.processes import MANAGE, PYTHON, Child, stop

from .counting import Count, open_events
from .outcomes import OPEN, SILENT, TOLD

#: Seconds after which the demo gives up waiting for a payer, or for the shop's decisions.
PATIENCE = 60.0
#: How many processes pay orders.
PAYERS = 4
#: The environment of a process of the payments' project; without it a process is the shop's.
PAYMENTS = {"DJANGO_SETTINGS_MODULE": "example_project.prepared_demo.payments_settings"}
PAYER = [*PYTHON, "-m", "example_project.prepared_demo.payer"]
LOGS = settings.DATA_DIR / "logs"


class FailedError(Exception):
    """The demo could not be carried out."""


def run(payments):
    """Carry out the demo; return the exit code."""
    demo = Demo(payments)
    try:
        try:
            demo.run()
        finally:
            stop(demo.children)
    except FailedError as failure:
        show_logs()
        print(f"\n{Count(demo.orders).table()}\n\nFAILED: {failure}")
        return 1
    count = Count(demo.orders)
    print(f"\n{count.table()}\n")
    if not count.passed:
        show_logs()
        print("FAILED: published is not what was committed.")
        return 1
    print("Each payment that was committed is published, once; nothing else is.")
    return 0


def answers(port):
    """Return whether a server listens on the port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=1):
        return True
    return False


def show_logs():
    """Write the end of every log to standard error."""
    for path in sorted(LOGS.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)


class Demo:
    """The processes of one run, and the outcome planned for the payment of each order."""

    def __init__(self, payments):
        self.payments = payments
        self.orders = {}
        self.progress = Progress()
        self.children = []
        self.servers = []

    def run(self):
        """Pay orders in transactions that end in every possible way."""
        migrating = self._start("payments-migrate", [*MANAGE, "migrate"], PAYMENTS)
        call_command("migrate", verbosity=0)
        self._wait(lambda: migrating.exit_code is not None, "the tables of the payments")
        for name, environment in (("shop", {}), ("payments", PAYMENTS)):
            port = os.environ[f"{name.upper()}_PORT"]
            server = [*MANAGE, "runserver", "--noreload", port]
            self.servers.append(self._start(f"{name}-web", server, environment))
            self._wait(partial(answers, port), f"the web server of the {name}")
        self.servers.append(self._start("shop-check-back", [*MANAGE, "run_prepared"]))
        self.progress.say("Payments that tell the shop what became of them.")
        self._pay(TOLD)
        self.progress.say(f"The shop knows what became of all but {open_events()}.")
        self.progress.say("Payments that are killed, each inside or right after its transaction.")
        self._pay(SILENT)
        self._wait_for_decisions()
        self.progress.say("Payments that hang in their transactions while the shop asks.")
        self._pay(OPEN, payers=1)  # SQLite has one writer at a time
        self._wait_for_decisions()

    def _pay(self, outcomes, *, payers=PAYERS):
        """Pay orders with these outcomes; each process pays a share of them."""
        orders = {}
        for outcome in outcomes:
            for _ in range(max(1, self.payments * outcome.share // 100)):
                orders[f"payment-{len(self.orders) + len(orders) + 1}"] = outcome.name
        for name, number in Counter(orders.values()).items():
            self.progress.say(f"  {number:>3} {name}")
        self.orders |= orders
        payments = [f"{order}={name}" for order, name in orders.items()]
        started = [
            self._start(f"payer-{len(self.children)}", [*PAYER, *payments[n::payers]], PAYMENTS)
            for n in range(payers)
        ]
        self._wait(lambda: all(payer.exit_code is not None for payer in started), "the payments")
        if any(payer.exit_code for payer in started):
            raise FailedError("a payer has ended with an error.")

    def _wait_for_decisions(self):
        self.progress.say(f"The shop has heard nothing of {open_events()}, and asks.")
        self._wait(lambda: not open_events(), "the shop's decisions")
        self.progress.say("All are decided.")

    def _wait(self, condition, what):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            for server in self.servers:
                if server.exit_code is not None:
                    raise FailedError(f"{server.name} has ended with {server.exit_code}.")
            if time.monotonic() > deadline:
                raise FailedError(f"{PATIENCE:.0f} s were not enough for {what}.")
            time.sleep(0.05)

    def _start(self, name, command, environment=None):
        child = Child(name, command, log=LOGS / f"{name}.log", environment=environment)
        self.children.append(child)
        return child
