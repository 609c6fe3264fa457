"""``python -m benchmarks soak``: runs a soak on each database, and prints the results.

Each database is soaked in its own process, so that both run side by side. The judge of
``outbox_app.history`` reads the history. Exit code 0: no promise is broken; 1: some are, and are
listed; 2: wrong arguments; 3: none is broken, but the run was too easy to tell: what is listed did
not happen. ``--keep DIR`` keeps the logs of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import django

from outbox_app.history import PROMISES, Record, judge
from tests.servers import processes

from . import books, faults
from .world import BROKERS, DATABASES, ROOT, World
from .writer import PUBLISHED

#: Those of ``--database both``.
BOTH = ("postgres", "mariadb")
COUNTS = {"writer": 3, "drainer": 3, "subscriptions": 2, "consumer": 1, "worker": 1}
PROGRESS_SECONDS = 10.0
#: Seconds after the last fault within which every job must be sent and every event handled.
DRAIN_SECONDS = 240.0
#: Settings of ``--immediate``. The hold is so short that some holds run out.
IMMEDIATE = {"IMMEDIATE": True, "IMMEDIATE_TIMEOUT": 0.4, "IMMEDIATE_HOLD": 1.6}
#: What must have happened, besides each of the chosen faults: otherwise the run was too easy.
REQUIRED = (
    *("takeover", "unknown outcome", "rollback", "extra publish"),
    "late commit below a cursor",
)
#: The promises that this history shows: no entities, prepared events and ids are made.
JUDGED = tuple(name for name in PROMISES if name not in ("P9", "P10", "P12", "P13"))
EXIT_TOO_EASY = 3
#: Printed findings of each promise, at most.
SHOWN = 10


def main(arguments: list[str]) -> int:
    """Soak the chosen databases. Returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are ended, too
    if options.database != "both":
        result = soak(options)
        if options.json:
            options.json.write_text(json.dumps(result))
        else:
            show([result])
        return code_of(result)
    return both(arguments, options)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="time in which faults happen")
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    parser.add_argument("--broker", choices=BROKERS, default="redis")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--faults",
        type=lambda text: text.split(","),
        default=list(faults.NAMES),
        metavar="NAME,NAME",
        help=f"default: all of {', '.join(faults.NAMES)}",
    )
    parser.add_argument("--jobs-per-second", type=float, default=50.0, metavar="N")
    parser.add_argument(
        "--immediate", action="store_true", help="writers publish right after their commits"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and books there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, print less")
    options = parser.parse_args(arguments)
    if unknown := set(options.faults) - set(faults.NAMES) - {""}:
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    return options


def both(arguments: list[str], options: argparse.Namespace) -> int:
    """Soak both databases side by side, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name in BOTH:
            own = ["--database", name, "--seed", str(options.seed), "--json", f"{folder}/{name}"]
            if options.keep:
                own += ["--keep", str(options.keep / name)]
            command = [sys.executable, "-m", "benchmarks", "soak", *arguments, *own]
            running[name] = subprocess.Popen(command, cwd=ROOT)
            processes.guard_process(running[name].pid, gently=True)
        try:
            codes = [process.wait() for process in running.values()]
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()
                processes.forget_process(process.pid)
        files = [Path(folder, name) for name in BOTH]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        show(results)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return worst_of(codes)


def worst_of(codes: list[int]) -> int:
    """Return the exit code of several soaks: a broken promise before one that was too easy."""
    return max((code for code in codes if code != EXIT_TOO_EASY), default=0) or max(codes)


def code_of(result: dict[str, Any]) -> int:
    """Return the exit code of a result."""
    if not result["holds"]:
        return 1
    return EXIT_TOO_EASY if result["did not happen"] else 0


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Soak one database. Returns the result."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{options.database} {time.monotonic() - began:4.0f}s] {text}", flush=True)

    say(f"seed={options.seed} broker={options.broker} minutes={options.minutes:g}")
    world = World(
        database=options.database,
        broker=options.broker,
        seed=options.seed,
        rate=options.jobs_per_second / COUNTS["writer"],
        writer_faults=[name for name in faults.WRITERS if name in options.faults],
        counts=COUNTS,
        outbox=IMMEDIATE if options.immediate else {},
        say=say,
    )
    with world:
        try:
            os.environ.update(world.environment())
            prepare()
            world.start()
            while not progress(world)["accepted"]:  # until the processes have started
                time.sleep(0.5)
            chaos = faults.Chaos(world, names=options.faults, seed=options.seed)
            chaos.start()
            watch(world, chaos, until=time.monotonic() + options.minutes * 60)
            chaos.end()
            drained = drain(world)
            codes = world.retire(*COUNTS)
            world.stop_tending()
            failed = {name: code for name, code in codes.items() if code}
            say(f"judging; ended with an error: {failed or 'none'}")
            result = judged(world, chaos.done, options.faults)
            result["holds"] &= drained
            kept = ("database", "broker", "seed", "minutes")
            return result | {name: getattr(options, name) for name in kept}
        finally:
            if options.keep:
                shutil.copytree(world.folder, options.keep, dirs_exist_ok=True)


def prepare() -> None:
    """Create the tables, and the keys that writers lock."""
    django.setup()
    from django.core.management import call_command

    from .models import Key
    from .writer import KEYS

    call_command("migrate", run_syncdb=True, verbosity=0)
    Key.objects.bulk_create(Key(name=name) for name in KEYS)


def watch(world: World, chaos: faults.Chaos, *, until: float) -> None:
    """Print the progress until the time is over."""
    while time.monotonic() < until:
        time.sleep(min(PROGRESS_SECONDS, max(0.0, until - time.monotonic())))
        world.say(f"{described(progress(world))} faults={sum(chaos.done.values())}")


def drain(world: World) -> bool:
    """Stop the writers, and wait until all jobs and events are done. Returns whether they are."""
    world.say("no more faults; draining")
    world.retire("writer")
    began = time.monotonic()
    while time.monotonic() < began + DRAIN_SECONDS:
        found = progress(world)
        if not any(found.get(name, 1) for name in ("staged", "behind", "unread", "unexecuted")):
            return True
        time.sleep(2)
        if time.monotonic() > began + DRAIN_SECONDS / 4:
            world.say(described(found))
    return False


def progress(world: World) -> Counter[str]:
    """Return the counts of jobs, messages and events; some are missing if a server is away."""
    from django.db import connection
    from django.db.models import Count

    from outbox_app.events.models import Event
    from outbox_app.models import DeadJob, StagedJob

    from .models import Committed, Handled

    found: Counter[str] = Counter()
    try:
        found.update(books.arrived(world.arrivals))
        found["unread"] = books.unread(world)
        found["committed"] = Committed.objects.count()
        found["staged"] = StagedJob.objects.count()
        found["dead"] = DeadJob.objects.count()
        handled = dict(Handled.objects.values_list("subscription").annotate(Count("id")))
        events = Event.objects.count()
        found["behind"] = sum(
            max(0, events - handled.get(name, 0)) for name in books.subscriptions()
        )
    except Exception as error:  # a server is away
        found["away"] = 1
        world.say(f"a server is away: {type(error).__name__}")
        connection.close()
    return found


def described(found: Counter[str]) -> str:
    """Return the text of a line of progress."""
    return " ".join(f"{name}={count}" for name, count in found.items())


def judged(world: World, done: Counter[str], chosen: list[str]) -> dict[str, Any]:
    """Judge the history, print the findings, and return the result."""
    history = list(books.history(world, done))
    verdict = judge(
        history,
        promises=JUDGED,
        required=[*REQUIRED, *filter(None, chosen)],
        sends_of_an_attempt=2 if world.broker_name == "redis" else 1,
    )
    for name, lines in verdict.findings.items():
        for line in lines[:SHOWN]:
            world.say(f"{name}: {line}")
    count = partial(_count, history)
    begun = {record["id"] for record in history if record.what == "transaction"}
    heard = {r["id"] for r in history if r.what == "transaction" and r.outcome != "unknown"}
    handled = Counter(r["subscription"] for r in history if r.what == "handle")
    committed = count("commit", "transaction")
    return {
        "transactions": {
            "committed": committed,
            "rolled back": len(begun) - committed,
            "outcome unknown to the writer": len(begun - heard),
        },
        "jobs": {
            "committed": count("stage", "job"),
            "accepted": count("publish", "job"),
            "dead": count("dead", "job"),
            "executed": count("execute", "job"),
            PUBLISHED: verdict.happened.pop(PUBLISHED, 0),
        },
        "events": {"committed": count("event", "position")}
        | {f"handled by {name}": n for name, n in handled.items()},
        "incidents": dict(Counter(r["kind"] for r in history if r.what == "incident")),
        "happened": dict(sorted(verdict.happened.items())),
        "did not happen": verdict.missing,
        "broken": {name: len(verdict.findings.get(name, ())) for name in JUDGED},
        "holds": verdict.holds,
    }


def _count(history: list[Record], what: str, name: str) -> int:
    return len({record[name] for record in history if record.what == what})


def show(results: list[dict[str, Any]]) -> None:
    """Print a table for each database."""
    for result in results:
        print(
            f"\n{result['database']} with {result['broker']}, {result['minutes']:g} minutes, "
            f"seed {result['seed']}"
        )
        for name in ("transactions", "jobs", "events", "incidents", "happened"):
            print(f"  {name:16}" + ", ".join(f"{n} {what}" for what, n in result[name].items()))
        for name, count in result["broken"].items():
            print(f"  {name + ' broken':16}{count}")
        if missing := result["did not happen"]:
            print(f"  too easy: there was no {', no '.join(missing)}")
