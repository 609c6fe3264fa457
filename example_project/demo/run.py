"""The demo from the first migration to the last count, in the order in which it happens.

Drainer, subscriptions, worker and writers are processes of their own, as in production. Every wait
is bounded: if nothing happens for a while, or a process ends unexpectedly, the demo fails and shows
the logs.
"""

import os
import sys
import time

from django.conf import settings
from django.core.management import call_command

from example_project import demo_user
from example_project.celery import app
from example_project.processes import DRAINER, PYTHON, SUBSCRIPTIONS, WORKER, Child, stop
from example_project.shop.models import Execution, Shelf
from outbox_app.events.models import Cursor
from outbox_app.models import Incident, StagedJob

from . import ledger, sale
from .counting import Count, Start, compare_views, total
from .terminal import Progress, incident_words, table

#: Seconds without any progress after which the demo gives up.
PATIENCE = 30.0
#: After so many seconds without another run of a task, no more duplicates are expected.
QUIET = 2.0
#: Freezes a drainer in its second batch, between publish and delete. This is the worst moment for a
#: kill: the broker has the jobs, and their rows are still in the outbox.
FREEZE = {"OUTBOX_FAILPOINT": "published_not_deleted=stop@2"}
#: Freezes a process that runs subscriptions in its third page, before the commit: it has written
#: to the views, and a kill rolls these writes back.
FREEZE_PAGE = {"OUTBOX_FAILPOINT": "handled=stop@3"}
#: Freezes the process of the sale after the commit of its third batch, before the answers to it.
FREEZE_SALE = {"OUTBOX_FAILPOINT": "entity_committed=stop@3"}


class Failed(Exception):
    """The demo could not be carried out."""


def run(orders, writers, buyers, pipeline):
    """Carry out the demo; return the exit code."""
    if pipeline:  # needs PySpark
        from .pipeline import REPORT, check_java, look_at_the_log

        if missing := check_java():
            print(missing)
            return 1
    call_command("migrate", verbosity=0)
    demo_user.make()
    demo = Demo(orders, writers)
    try:
        try:
            demo.start()
            demo.kill_a_subscriber()
            demo.kill_a_drainer()
            demo.empty_the_broker()
            demo.wait_for_executions()
            demo.wait_for_views()
            sold = demo.sell(buyers)
        finally:
            demo.stop()
    except Failed as failure:
        show_logs()
        print(f"\n{table(demo.count())}\n\nFAILED: {failure}")
        return 1
    count = demo.count()
    print(f"\n{table(count)}\n{sold.lines()}\n")
    if not (count.passed and sold.passed):
        show_logs()
        print("FAILED: the table above says what is wrong.")
        return 1
    if pipeline and not look_at_the_log(demo.progress):
        print("\nFAILED: the log of the events is not as it should be; see above.")
        return 1
    print(("\n" if pipeline else "") + "Nothing was lost and nothing leaked.")
    if pipeline:
        print(f"The audit's report, with pictures: {REPORT}")
    print(how_to_look())
    return 0


def how_to_look():
    """Return what to type to see the result in the admin."""
    given = [name for name in ("DATABASE_URL", "BROKER_URL") if name in os.environ]
    same = f" with the same {' and '.join(given)}" if given else ""
    return (
        f"To look around: make up{same}\n"
        "then http://127.0.0.1:8000/ for the shop and http://127.0.0.1:8000/admin/ for the outbox "
        f"(user {demo_user.NAME}, password {demo_user.PASSWORD})."
    )


def show_logs():
    """Write the end of every log to standard error."""
    for path in sorted((settings.DATA_DIR / "logs").glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-25:]
        if lines:
            print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)


class Demo:
    """The processes of one run, and its ledgers."""

    def __init__(self, orders, writers):
        self.orders = orders
        self.begun = Start.now()
        self.progress = Progress()
        self.folder = settings.DATA_DIR / "ledger" / time.strftime("%Y%m%d-%H%M%S")
        self.folder.mkdir(parents=True)
        self.children = []
        self.writers = []
        self.purged = 0
        self.told = self.begun.incident
        self.shares = [orders // writers + (n < orders % writers) for n in range(writers)]

    def start(self):
        """Start a drainer, a worker, the subscriptions, and the writers."""
        self._start("drainer-1", DRAINER)
        self._start("worker", [*WORKER, "--loglevel", "WARNING"])
        self.subscriptions = self._start("subscriptions-1", SUBSCRIPTIONS, FREEZE_PAGE)
        for number, share in enumerate(self.shares, 1):
            name = f"writer-{number}"
            ledger_file = self.folder / f"{name}.jsonl"
            writer = [*PYTHON, "-m", "example_project.demo.writer"]
            writer += ["--orders", str(share), "--ledger", str(ledger_file)]
            self.writers.append(self._start(name, writer))

    def kill_a_subscriber(self):
        """Kill the process of the subscriptions once it is frozen, and start another."""
        victim = self.subscriptions
        self._wait(lambda: victim.is_frozen() or self._is_all_sent(), "a page of events")
        victim.kill()
        self.children.remove(victim)
        self._start("subscriptions-2", SUBSCRIPTIONS)
        self.progress.say(
            f"{victim.name} (process {victim.pid}) killed with SIGKILL in the middle of a page. "
            "Another one goes on when its lease has run out; until then one view is pushed only."
        )

    def kill_a_drainer(self):
        """Start a second drainer, and kill it once it is frozen, with a batch in flight."""
        self._wait(lambda: ledger.count(self.folder) >= self.orders // 4, "the first orders")
        victim = self._start("drainer-2", DRAINER, FREEZE)
        self._wait(lambda: victim.is_frozen() or self._is_all_sent(), "the worst moment")
        victim.kill()
        self.children.remove(victim)
        self.progress.say(
            f"{victim.name} (process {victim.pid}) killed with SIGKILL. Its shards wait until its "
            "lease has run out; what it has published already goes again if no worker starts it."
        )

    def empty_the_broker(self):
        """Delete the messages that the worker has not taken, as a broker that comes back empty."""
        enough = max(1, self.orders // 20)
        self._wait(lambda: self._purge() >= enough or self._is_all_sent(), "messages to lose")
        self.progress.say(
            f"The broker was emptied: {self.purged:,} messages are gone. Their rows stay until the "
            "worker has executed them, so a drainer sends them again."
        )

    def wait_for_executions(self):
        """Wait until each task of each committed order has run, and no more runs are noted."""
        self._wait(self._is_all_placed, "the writers")
        expected = len(self.count().expected)
        self._wait(lambda: self._runs() >= expected and self.count().finished, "the executions")
        self._wait(lambda: not StagedJob.objects.exists(), "an empty outbox")
        runs, since = self._runs(), time.monotonic()
        while time.monotonic() - since < QUIET:
            time.sleep(0.2)
            if self._runs() != runs:
                runs, since = self._runs(), time.monotonic()
        self._tell_incidents()

    def wait_for_views(self):
        """Wait until the views agree with the orders."""
        self._wait(lambda: not any(view.wrong for view in compare_views()), "the views")

    def sell(self, buyers):
        """Hold a flash sale, kill its process, let all buyers ask again; return the SaleCount."""
        shelf, pieces = f"sale-{self.folder.name}", max(1, buyers // 10)
        Shelf.execute(shelf, "fill", {"pieces": pieces}, command_id="first")
        paths = [self.folder / f"sale-{number}.txt" for number in (1, 2)]
        command = [*PYTHON, "-m", "example_project.demo.sale", "--shelf", shelf]
        command += ["--buyers", str(buyers), "--answers"]
        victim = self._start("sale-1", [*command, str(paths[0])], FREEZE_SALE)
        self.writers.append(victim)  # a sale to a few buyers ends before its third batch
        self._wait(lambda: victim.is_frozen() or victim.exit_code is not None, "a batch of buyers")
        what = "killed with SIGKILL between a commit and its answers"
        if victim.exit_code is not None:
            what = "was over before it could be killed"
        victim.kill()
        self.children.remove(victim)
        told_before = sale.answers(paths[0])
        self.progress.say(
            f"{victim.name} (process {victim.pid}) {what}. "
            f"{len(told_before):,} of {buyers:,} buyers have been told; all ask again."
        )
        self.writers.append(self._start("sale-2", [*command, str(paths[1])]))
        self._wait(self._is_all_placed, "the buyers")

        def count():
            told = sale.answers(paths[1])
            return sale.SaleCount(shelf, buyers, pieces, told_before, told)

        self._wait(lambda: not count().missing, "the receipts of the sale")
        return count()

    def stop(self):
        """Stop the processes that still run, the worker last."""
        self.progress.say("Stopping the processes.")
        stop([child for child in self.children if child.name != "worker"])
        stop(self.children)
        failed = [c.name for c in self.children if c.exit_code != 0]
        if failed:
            self.progress.say(f"did not end with exit code 0: {', '.join(failed)}")

    def count(self):
        """Compare the ledgers with the worker's notes."""
        return Count(ledger.read(self.folder), self.begun, self.purged)

    def _start(self, name, command, environment=None):
        log = settings.DATA_DIR / "logs" / f"{name}.log"
        child = Child(name, command, log=log, environment=environment)
        self.children.append(child)
        return child

    def _is_all_placed(self):
        return all(writer.exit_code is not None for writer in self.writers)

    def _is_all_sent(self):
        return self._is_all_placed() and not StagedJob.objects.exists()

    def _purge(self):
        self.purged += app.control.purge()
        return self.purged

    def _runs(self):
        return Execution.objects.filter(pk__gt=self.begun.execution).count()

    def _wait(self, condition, what):
        """Show progress until the condition holds; fail if nothing moves or a process has ended."""
        before, moved = None, time.monotonic()
        while True:
            self._check_children()
            self._tell_incidents()
            if condition():
                return
            handled = total("handled", Cursor.objects)
            now = (ledger.count(self.folder), self._runs(), StagedJob.objects.count(), handled)
            if now != before:
                before, moved = now, time.monotonic()
            elif time.monotonic() - moved > PATIENCE:
                raise Failed(f"nothing has happened for {PATIENCE:.0f} s, waiting for {what}.")
            placed, ran, waiting, _ = now
            text = f"{placed:,} orders placed, {waiting:,} jobs in the outbox, {ran:,} runs"
            self.progress.show(ran, 2 * self.orders, text)  # 2 of 3 orders commit, 3 tasks each
            time.sleep(0.1)

    def _tell_incidents(self):
        """Show each new incident, such as another drainer's takeover of the killed one's shards."""
        for incident in Incident.objects.filter(pk__gt=self.told).order_by("pk"):
            self.progress.say(f"Incident recorded: {incident_words(incident)}.")
            self.told = incident.pk

    def _check_children(self):
        for child in self.children:
            expected = (None, 0) if child in self.writers else (None,)
            if child.exit_code not in expected:
                raise Failed(f"{child.name} has ended with exit code {child.exit_code}.")
