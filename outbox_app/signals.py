"""Signals of the package. Logs and metrics connect to them; the core imports no vendor.

If a receiver raises, Django logs the error (``send_robust``) and the sender continues, unless the
signal says otherwise. Receivers run in the process that does the work: those of ``jobs_staged``
in the caller's transaction, before its commit; those of ``jobs_published`` in the drainer or, with
immediate delivery, in the caller's process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from django.dispatch import Signal

#: Sent after rows were written, before the commit. The error of a receiver that has undone the
#: caller's transaction is raised, and so is the time limit of its task. Arguments: ``using`` (str),
#: ``jobs`` (list of StagedJob).
jobs_staged = Signal()

#: Sent after the broker took a batch. Arguments: ``using`` (str), ``count`` (int), ``seconds``
#: (float: publish time of the batch), ``jobs`` (list of jobs.drain.batch.Row).
jobs_published = Signal()

#: Sent after a row was moved to the dead table. Arguments: ``using`` (str), ``dead`` (DeadJob).
job_dead = Signal()

#: Sent after an incident was committed. Arguments: ``using`` (str), ``incident`` (Incident).
incident_recorded = Signal()

#: Sent when a drainer begins and ends. Arguments: ``using`` (str), ``drainer`` (jobs.Drain).
drainer_started = Signal()
drainer_stopped = Signal()


def renew_locks_at_fork(names: Mapping[str, Any]) -> None:
    """Let no forked child wait for a thread of its parent that was sending a signal of these."""

    def renew() -> None:
        for each in names.values():
            if isinstance(each, Signal):
                each.lock = threading.Lock()

    os.register_at_fork(after_in_child=renew)


renew_locks_at_fork(globals())
