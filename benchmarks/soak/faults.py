"""The faults. Each is a function that injects a real fault into a world, and undoes it at the end.

Two threads inject faults side by side, one into processes, one into servers and the network. Each
thread has its own random generator, so that a seed repeats the choices of both.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .world import FAILPOINTS, LEASE_SECONDS, World

#: A fault returns False if it was not injected, for example if a repartition was refused.
Fault = Callable[[World, random.Random], bool | None]
PROCESSES: dict[str, Fault] = {}
SERVERS: dict[str, Fault] = {}
#: Faults that the writers inject themselves.
WRITERS = ("killed-at-commit", "long-transaction")
#: Mean pause between two faults of a thread, in seconds.
PAUSE = 3.0


def into(table: dict[str, Fault], name: str) -> Callable[[Fault], Fault]:
    """Return a decorator that adds a fault to a table under this name."""

    def enter(function: Fault) -> Fault:
        table[name] = function
        return function

    return enter


class Chaos:
    """Injects faults until it is ended.

    Args:
        world: The world to inject them into.
        names: The faults to choose from.
        seed: The seed of the random choices.
    """

    def __init__(self, world: World, *, names: Sequence[str], seed: int) -> None:
        self.world = world
        self.done: Counter[str] = Counter()
        self._ended = threading.Event()
        self._threads = []
        for table in (PROCESSES, SERVERS):
            chosen = [name for name in sorted(table) if name in names]
            generator = random.Random(f"{seed}/{sorted(table)[0]}")
            if chosen:
                run = threading.Thread(
                    target=self._run, args=[table, chosen, generator], daemon=True
                )
                self._threads.append(run)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Inject no more faults, and wait until the last ones are undone."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, table: dict[str, Fault], names: list[str], generator: random.Random) -> None:
        from django.db import connection

        while not self._ended.wait(generator.expovariate(1 / PAUSE)):
            name = generator.choice(names)
            try:
                self.done[name] += table[name](self.world, generator) is not False
            except Exception as error:  # the fault could not be injected; the run goes on
                self.world.say(f"{name} failed: {error!r}")
            connection.close()  # a fault may have broken the connection


# Processes.


def _signalling(kind: str, number: int) -> Fault:
    def fault(world: World, random: random.Random) -> None:
        program = world.some(kind, random)
        if number == signal.SIGKILL:
            program.kill()
        else:
            program.signal(number)

    return fault


def _freezing(kind: str) -> Fault:
    def fault(world: World, random: random.Random) -> None:
        program = world.some(kind, random)
        program.signal(signal.SIGSTOP)
        time.sleep(random.choice([0.3, 1.2, 1.8]) * LEASE_SECONDS)
        program.signal(signal.SIGCONT)

    return fault


def _at_failpoint(kind: str) -> Fault:
    def fault(world: World, random: random.Random) -> None:
        program = world.some(kind, random)
        action = random.choice(["kill", "kill", "stop", "exit"])
        point = random.choice(FAILPOINTS[kind])
        program.failpoint = f"{point}={action}@{random.randint(1, 20)}"
        program.signal(signal.SIGTERM)

    return fault


for kind in ("drainer", "subscriptions", "writer"):
    PROCESSES[f"kill-{kind}"] = _signalling(kind, signal.SIGKILL)
    PROCESSES[f"terminate-{kind}"] = _signalling(kind, signal.SIGTERM)
    PROCESSES[f"freeze-{kind}"] = _freezing(kind)
    PROCESSES[f"failpoint-{kind}"] = _at_failpoint(kind)
for kind in ("consumer", "worker"):
    PROCESSES[f"kill-{kind}"] = _signalling(kind, signal.SIGKILL)


@into(PROCESSES, "repartition")
def repartition(world: World, random: random.Random) -> bool:
    """Change the number of partitions, while processes with the old number run."""
    new = random.choice([n for n in (1, 2, 3, 4, 6) if n != world.partitions])
    if not _repartition(new):
        return False  # refused each time, because a partition was behind
    world.partitions = new
    _restart_subscriptions(world)
    return True


def _repartition(wanted: int) -> bool:
    """Repartition as ``outbox_subscriptions repartition`` does; retry while it is refused."""
    import django.db

    from outbox_app.events.subscriptions.control import repartition
    from outbox_app.events.subscriptions.subscriber import register, subscriber_named
    from outbox_app.exceptions import OutboxError

    register(replace(subscriber_named("parts"), partitions=wanted))
    refused = 0
    while refused < 20:
        try:
            repartition("parts")
        except OutboxError:
            refused += 1
            time.sleep(0.2)
        except django.db.Error:  # the change may have been committed: the next call finds out
            django.db.connection.close()
            time.sleep(0.5)
        else:
            return True
    return False


def _restart_subscriptions(world: World) -> None:
    for program in [each for each in world.programs if each.kind == "subscriptions"]:
        before = program.starts
        program.signal(signal.SIGTERM)
        for _ in range(100):
            if program.starts > before:
                break
            time.sleep(0.1)
        time.sleep(1)


# Servers and the network.


def _through(which: str, mode: str) -> Fault:
    def fault(world: World, random: random.Random) -> None:
        proxy = world.to_broker if which == "broker" else world.to_database
        if mode == "cut":
            proxy.cut()
            return
        proxy.delay = random.uniform(0.05, 0.5)
        proxy.mode = mode
        time.sleep(random.uniform(0.5, 1.5 * LEASE_SECONDS))
        proxy.mode = "pass"
        if mode in ("blackhole", "drop_reply"):
            # First let clients that wait for an answer run into their own timeouts, for a while.
            time.sleep(random.uniform(0, LEASE_SECONDS))
            proxy.cut()

    return fault


for which in ("broker", "database"):
    for mode in ("cut", "blackhole", "drop_reply", "cut_on_reply", "delay", "refuse"):
        SERVERS[f"{which}-{mode.replace('_', '-')}"] = _through(which, mode)


@into(SERVERS, "broker-killed")
def kill_broker(world: World, random: random.Random) -> None:
    """Kill the broker, and start it again with its data."""
    world.broker.kill()
    time.sleep(random.uniform(0, 3))
    world.broker.start()


@into(SERVERS, "broker-full")
def fill_broker(world: World, random: random.Random) -> None:
    """Let Redis run out of memory, or raise RabbitMQ's memory alarm."""
    if world.broker_name == "redis":
        with _redis(world) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 20_000)
            time.sleep(random.uniform(1, 5))
            client.config_set("maxmemory", 0)
    else:
        world.broker.control("set_vm_memory_high_watermark", "0.00001")
        time.sleep(random.uniform(1, 5))
        world.broker.control("set_vm_memory_high_watermark", "0.4")


@into(SERVERS, "requeue")
def refuse_and_requeue(world: World, random: random.Random) -> bool:
    """Make the broker refuse a queue until jobs are dead; repair it, and requeue the jobs."""
    from outbox_app.models import DeadJob

    if world.broker_name == "redis":
        with _redis(world) as client:
            while not client.set("soak-fragile", "no list", nx=True):
                time.sleep(0.02)  # NX: only an empty list may be replaced
            time.sleep(3)
            client.delete("soak-fragile")
    else:
        world.broker.control("delete_queue", "soak-fragile", "--if-empty")
        time.sleep(3)
    return DeadJob.objects.exists() and not world.run("outbox_dead", "requeue", "--all")[0]


@into(SERVERS, "database-killed")
def kill_database(world: World, random: random.Random) -> None:
    """Kill the database server, and start it again with its data."""
    world.database.kill()
    time.sleep(random.uniform(0, 3))
    world.database.start()


@into(SERVERS, "database-restarted")
def restart_database(world: World, random: random.Random) -> None:
    """Restart the database server as an administrator does, over open connections."""
    world.database.restart()


@into(SERVERS, "terminate-sessions")
def terminate_sessions(world: World, random: random.Random) -> None:
    """Let the database server end some sessions."""
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("SELECT id FROM information_schema.processlist WHERE user = 'outbox'")
        else:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE usename = 'outbox'")
        others = [pid for (pid,) in cursor.fetchall() if pid != _own_session(cursor)]
        for pid in random.sample(sorted(others), min(len(others), 3)):
            if connection.vendor == "mysql":
                cursor.execute(f"KILL {pid:d}")
            else:
                cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


def _own_session(cursor: Any) -> int:
    vendor = cursor.db.vendor
    cursor.execute("SELECT " + ("CONNECTION_ID()" if vendor == "mysql" else "pg_backend_pid()"))
    return int(cursor.fetchone()[0])


def _redis(world: World) -> Any:
    from redis import Redis

    return Redis.from_url(world.broker.url, socket_timeout=10)


NAMES = (*sorted(PROCESSES), *sorted(SERVERS), *WRITERS)
