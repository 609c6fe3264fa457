"""What P4 means in a history: runs of jobs with a receipt, as their workers have written them.

A run that did not end, as its worker was lost, is ``unknown``; one that is no end (a retry, a
rejection with requeue) is ``failed``. A worker that is cut off from the database for longer than
its lease, and goes on, keeps its run's lease until then only: ``kept``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import inf

from .record import OK, UNKNOWN, Record
from .rules import Books, rule, where


@rule("P4")
def _executed(books: Books) -> Iterator[str]:
    ended = {record["job"] for record in books.of["run"] if record.outcome == OK}
    visible = ended | books.dead.keys() | books.rows.keys() | books.gone
    for job, staged in books.jobs.items():
        if job not in visible and any(record.get("receipt") for record in staged):
            yield f"job {job} has a receipt, and neither ended nor is visible: {where(staged)}"


@rule("P4")
def _one_at_a_time(books: Books) -> Iterator[str]:
    for job, runs in books.runs().items():
        latest = -inf
        for run in runs:
            began = -inf if run.began is None else run.began
            if began < latest:
                yield f"job {job} was begun by {run.who} at {began}, while another one ran it"
            latest = max(latest, _kept(run))


@rule("P4")
def _not_again(books: Books) -> Iterator[str]:
    for job, runs in books.runs().items():
        settled = min((r["settled"] for r in runs if r.get("settled") is not None), default=inf)
        for run in runs:
            if run.began is not None and run.began > settled:
                yield f"job {job} was begun by {run.who} at {run.began}; it had ended at {settled}"


@rule("P4")
def _extra_runs(books: Books) -> Iterator[str]:
    for job, runs in books.runs().items():
        for run, later in pairwise(runs):
            # Without its end in the database, a run that ended looks lost, and is repeated.
            settled, kept = run.get("settled"), run.get("kept")
            if run.outcome == OK and settled is not None and kept is None:
                yield f"job {job} was run again by {later.who}, and nothing explains it"


def _kept(run: Record) -> float:
    """Return until when a run had its job for itself, as far as that is known."""
    ended = -inf if run.ended is None or run.outcome == UNKNOWN else run.ended
    kept: float | None = run.get("kept")
    if kept is None:
        return ended
    return kept if run.outcome == UNKNOWN else min(kept, ended)
