"""``python -m benchmarks soak``: runs a soak on each database, and prints the results.

Each database is soaked in its own process, so that both run side by side. Exit code 0: nothing was
lost, leaked, doubled, unexplained or out of order; 1: something was, and is listed; 2: wrong
arguments. ``--keep DIR`` keeps the logs of all processes.
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
from pathlib import Path
from typing import Any

import django

from tests.servers import processes

from . import books, faults
from .judge import VERDICTS, judge
from .world import BROKERS, DATABASES, ROOT, World

COUNTS = {"writer": 3, "drainer": 3, "subscriptions": 2, "consumer": 1, "worker": 1}
PROGRESS_SECONDS = 10.0
#: Seconds after the last fault within which every job must be sent and every event handled.
DRAIN_SECONDS = 240.0
#: Settings of ``--immediate``. The hold is so short that some holds run out.
IMMEDIATE = {"IMMEDIATE": True, "IMMEDIATE_TIMEOUT": 0.4, "IMMEDIATE_HOLD": 1.6}
#: Printed findings of each kind, at most.
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
        return 0 if result["holds"] else 1
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
        for name in DATABASES:
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
        files = [Path(folder, name) for name in DATABASES]
        show([json.loads(file.read_text()) for file in files if file.exists()])
    return max(codes)


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
            result = judged(world, chaos.done)
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


def judged(world: World, done: Counter[str]) -> dict[str, Any]:
    """Judge the books, print the findings, and return the result."""
    found = books.read(world)
    verdict = judge(found)
    known = books.transactions(world)
    for name in verdict.findings:
        for line in verdict.findings[name][:SHOWN]:
            world.say(f"{name.upper()}: {line}")
    unhappy = {number for number in known["begun"]} - set(known["committed"]) - set(known["rolled"])
    return {
        "transactions": {
            "committed": len(found.committed),
            "rolled back": len(known["begun"]) - len(found.committed),
            "outcome unknown to the writer": len(unhappy),
        },
        "jobs": {
            "committed": len({row.task_id for row in found.rows}),
            "accepted": len({arrival.task_id for arrival in found.arrivals}),
            "dead": len(found.dead),
            "executed": len(set(found.executed)),
            "published by writers": sum(map(int, known["immediate"])),
        },
        "events": {"committed": len(found.events)}
        | {f"handled by {name}": len(each) for name, each in found.handled.items()},
        "incidents": dict(Counter(incident.kind for incident in found.incidents)),
        "duplicates explained": verdict.explained,
        "verdicts": {name: verdict.count(name) for name in VERDICTS},
        "faults": dict(sorted((done + Counter(known["fault"])).items())),
        "holds": verdict.holds,
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print a table for each database."""
    for result in results:
        print(
            f"\n{result['database']} with {result['broker']}, {result['minutes']:g} minutes, "
            f"seed {result['seed']}"
        )
        for name in ("transactions", "jobs", "events", "incidents", "faults"):
            print(f"  {name:22}" + ", ".join(f"{n} {what}" for what, n in result[name].items()))
        print(f"  {'duplicates explained':22}{result['duplicates explained']}")
        for name, count in result["verdicts"].items():
            print(f"  {name.replace('_', ' '):22}{count}")
