"""The counters of commands to entities in the last minutes.

The processes that execute commands write these counters on the alias of the entities. Figures of
several aliases are added up.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..database.clock import stored
from ..monitoring.series import MINUTE, last_minutes, percentiles, rows_of, totals
from ..process import counters

#: Commands of entities that were recorded; rejected ones by code; repeated attempts; batches by
#: size, and by the duration of their transaction, in the buckets of ``delay``.
COMMANDS, REJECTED, CODE, CONFLICTS = "commands", "rejected_commands", "code", "command_conflicts"
BATCH_SIZE, COMMIT_TIME = "command_batch_size", "command_commit_time"
#: Commands of routed types that another server has passed on, and commands that were executed by a
#: server that does not lead their entity.
ROUTED, ROUTE = "routed_commands", "route"
PASSED, ELSEWHERE = "passed_on", "elsewhere"
#: How many commands wait in a process (a sample).
WAITING = "commands_waiting"
#: The names of all of them.
NAMES = (COMMANDS, REJECTED, CONFLICTS, ROUTED, BATCH_SIZE, COMMIT_TIME, WAITING)

#: Upper bounds of the buckets of batch sizes; one more bucket has the larger batches.
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SIZE_LABELS = (*map(str, SIZES), "+Inf")
#: The most codes of rejections that are listed.
LISTED = 50


@dataclass(frozen=True, slots=True)
class Commands:
    """What became of the commands to entities."""

    #: In the last full minute: commands recorded, attempts beyond the first, rejections by code.
    recorded: float = 0.0
    conflicts: float = 0.0
    rejected: dict[str, float] = field(default_factory=dict)
    #: In the last minutes: p50 and p95 of commands per batch, and of seconds per transaction.
    batch_size: tuple[float | None, ...] = (None, None)
    commit_seconds: tuple[float | None, ...] = (None, None)
    #: Commands that wait, by the last sample of each process that wrote one lately.
    waiting: float = 0.0
    #: Commands of routed types in the last full minute: passed on by another server; executed by a
    #: server that does not lead their entity.
    passed_on: float = 0.0
    elsewhere: float = 0.0


def commands(aliases: Collection[str], *, minutes: int = 5) -> Commands:
    """Return figures about commands to entities on some aliases, the current minute included."""
    found: Any = defaultdict(Counter)
    lately: Any = defaultdict(Counter)
    waiting: Any = Counter()
    for using in aliases:
        first, last = last_minutes(using, minutes)
        rows = rows_of(using, NAMES, first, last)
        for name, label, total, of_full in totals(rows, last):
            found[name][label] += total
            lately[name][label] += of_full
        samples = rows.filter(name=WAITING, minute__gte=stored(last - MINUTE, using=using))
        waiting.update(dict(samples.order_by("minute").values_list("source", "value")))

    sizes = percentiles(found[BATCH_SIZE], SIZE_LABELS, 0.5, 0.95)
    return Commands(
        recorded=lately[COMMANDS].total(),
        conflicts=lately[CONFLICTS].total(),
        rejected={code: n for code, n in lately[REJECTED].most_common(LISTED) if n},
        batch_size=tuple(size and math.ceil(size) for size in sizes),
        commit_seconds=percentiles(found[COMMIT_TIME], counters.BUCKETS, 0.5, 0.95),
        waiting=waiting.total(),
        passed_on=lately[ROUTED][PASSED],
        elsewhere=lately[ROUTED][ELSEWHERE],
    )
