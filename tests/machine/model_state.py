"""The state of one run: a database, a broker, drainers with faults, and the model beside them.

``check`` compares what there is with the model; it holds after every step. ``finish`` makes all
well at the end (the broker works, leases run out, zombies go on) and drains what is left: then
nothing may be missing, and every extra publish must belong to an incident. Time is virtual:
``pass_time`` moves the drainers' clocks on, and what the database remembers back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any
from unittest import mock
from uuid import UUID

from django.db.models import F
from django.test import override_settings

from outbox_app.jobs import immediate
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob
from outbox_app.process import backoff, lease

from .brokers import Broker
from .fault_injector import FaultInjector, set_failpoints
from .model import Model
from .writer import DUE, LateWriter, Writer

#: In seconds. The database's clock goes on in real time too: no sum of the times that the machine
#: lets pass comes near the lease from below.
LEASE = 69
#: Within which a process that has committed says what became of its jobs.
HOLD = 60
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Stage:
    """Where the machine plays: a database, and what Celery offers."""

    alias: str
    #: One task of each Celery app.
    tasks: Sequence[Any]
    #: Empties the broker, and makes it refuse its refused queue, or take it.
    reset_broker: Callable[[bool], None]
    #: Whether a row can be written while another transaction has written one.
    concurrent_writers: bool = True


class ModelState:
    """See the module.

    Args:
        stage: Where it is. The outbox's tables are emptied.
        **settings: The outbox's.
    """

    def __init__(self, stage: Stage, **settings: Any) -> None:
        self.using = stage.alias
        self.model = Model()
        self.writer = Writer(using=stage.alias, tasks=stage.tasks, model=self.model)
        self.late: LateWriter | None = None
        self.injectors: list[FaultInjector] = []
        #: What the latest check found in the dead table: errors and reasons by task id.
        self.dead: dict[str, tuple[str, str]] = {}
        self.passed = 0.0
        Broker.current = self.broker = Broker(self.model.accepted)
        stage.reset_broker(True)
        for model in (StagedJob, DeadJob, Incident, Process):
            model.objects.using(self.using).all().delete()
        Lease.objects.using(self.using).update(owner=None)
        set_failpoints(on=True)
        # Drainers' ids decide on who gets which shards; from a counter, so that runs repeat.
        ids = (UUID(int=number) for number in count(1))
        own = {"DATABASE": self.using, "LEASE_SECONDS": LEASE, "WAKE": False}
        own |= {"IMMEDIATE_TIMEOUT": 15, "IMMEDIATE_HOLD": HOLD}
        self._patches = ExitStack()
        self._patches.enter_context(mock.patch.object(lease, "uuid4", ids.__next__))
        self._patches.enter_context(mock.patch.object(backoff, "MAX_BACKOFF", 0))
        self._patches.enter_context(override_settings(OUTBOX={**own, **settings}))

    def close(self) -> None:
        """Leave nothing behind."""
        if self.late is not None:
            self.late.end(commit=False)
        for injector in self.alive:
            injector.kill()
        set_failpoints(on=False)
        for broker in immediate._brokers.values():
            broker.close()
        immediate._brokers.clear()
        self._patches.close()

    @property
    def alive(self) -> list[FaultInjector]:
        return [injector for injector in self.injectors if injector.alive]

    def start(self) -> FaultInjector:
        """Return one more drainer, which has yet to do its first step."""
        injector = FaultInjector(using=self.using, clock=lambda: self.passed)
        self.injectors.append(injector)
        return injector

    def pick(self, which: int) -> FaultInjector:
        """Return one of the drainers, a new one where none is alive."""
        alive = self.alive or [self.start()]
        return alive[which % len(alive)]

    def pass_time(self, seconds: float) -> None:
        """Let time pass for everybody."""
        self.passed += seconds
        ago = timedelta(seconds=seconds)
        Process.objects.using(self.using).update(heartbeat_at=F("heartbeat_at") - ago)
        # One by one: on MariaDB an UPDATE that scans would wait for rows of the late transaction.
        held = StagedJob.objects.using(self.using).held()
        for id in list(held.values_list("id", flat=True)):
            held.filter(id=id).update(available_at=F("available_at") - ago)

    def check(self, incidents: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Raise AssertionError where a promise is broken that holds at any time."""
        self._check_jobs(incidents)
        self._check_owners()

    def _check_jobs(self, incidents: Sequence[Mapping[str, Any]] | None) -> None:
        staged = list(StagedJob.objects.using(self.using).values_list("task_id", flat=True))
        buried = DeadJob.objects.using(self.using).values_list("task_id", "error", "reason")
        self.dead = {task_id: (error, reason) for task_id, error, reason in buried}
        assert len(self.dead) == len(buried), f"dead twice: {buried}"
        self.model.check(staged, self.dead, incidents)

    def _check_owners(self) -> None:
        owner = dict(Lease.objects.using(self.using).values_list("part", "owner"))
        seen: dict[int, FaultInjector] = {}
        for injector in self.alive:
            # Amid its statements it may be changing what it owns; it then publishes nothing. With
            # a clock that stood still it may publish what is in its hand.
            if not injector.trusts_itself or injector.place == "sql" or injector.behind:
                continue
            for part in injector.drain.holder.owned:
                assert part not in seen, f"two drainers own shard {part}: {injector} {seen[part]}"
                assert owner[part] == injector.drain.holder.id, f"{injector} lost shard {part}"
                seen[part] = injector

    def finish(self) -> None:
        """Drain everything, and raise AssertionError where a promise was broken in the end."""
        self.broker.up = True
        zombies = self.alive
        self.pass_time(DUE)
        self._drain()
        for zombie in zombies:
            zombie.stop()
        self.pass_time(DUE)
        self._drain()
        for injector in self.alive:
            injector.stop()
        incidents = Incident.objects.using(self.using)
        self.check(
            [
                {
                    "kind": incident.kind,
                    "drainer": "".join(_UUID.findall(incident.drainer)),
                    "shards": incident.shards,
                    "first": incident.first_id,
                    "last": incident.last_id,
                }
                for incident in incidents
            ]
        )

    def _drain(self) -> None:
        injector = self.start()
        left = StagedJob.objects.using(self.using)
        for _ in range(20 + 2 * left.count()):
            injector.go()
            self.check()
            if not left.exists():
                return
            self.pass_time(10)
        raise AssertionError(f"not drained: {list(left.values_list('task_id', flat=True))}")
