"""A drainer with faults: a real ``Drain.run()`` in a thread with a connection of its own.

One thread runs at a time: a drainer that was told to ``go`` runs to the end of its turn, or to the
operation that its ``Plan`` names, and waits there. An operation is a statement, a commit, a send to
the broker, or a failpoint. There the plan may pause the drainer (which may be a zombie when it goes
on), kill it (nothing of it runs any more, as after SIGKILL), or let the operation fail before or
after it took effect. A drainer inside a transaction is never paused: it would hold locks, which no
real pause of interest needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from django.db import OperationalError, connections

from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.drain.drain import Drain

FAILPOINTS = ("claimed", "published_not_deleted", "deleted")
#: Those of the process that commits, with immediate delivery.
IMMEDIATE = ("immediate_claimed", "immediate_published", "immediate_deleted")
#: Longer than any turn takes; a drainer that needs more hangs.
STUCK_SECONDS = 30

_here = threading.local()


class Killed(BaseException):
    """The drainer's process has ended here."""


class Plan(NamedTuple):
    """What is to happen at the nth operation of a kind from now on."""

    #: "pause", "kill", "fail" (before it took effect) or "lose" (its reply, after it).
    action: str
    #: "send", "sql", the first word of a statement, "commit", or a failpoint.
    where: str
    nth: int = 1


class FaultInjector:
    """One drainer, whose operations may fail or never end.

    Args:
        using: Database alias.
        clock: Monotonic clock by which it trusts its lease.
        **options: What ``Drain`` takes.
    """

    def __init__(self, *, using: str, clock: Callable[[], float], **options: Any) -> None:
        self.using = using
        self.clock = clock
        self.options = options
        #: Where it waits: "start", "turn" (between two turns), an operation, or "ended".
        self.place = "start"
        #: Seconds for which its clock has stood still. It catches up when its batch is done.
        self.behind = 0.0
        #: Whether what was planned has happened, the latest time it went on.
        self.has_met_its_plan = False
        self.drain: Drain | None = None
        self._plan: Plan | None = None
        self._latest = ""
        self._killed = False
        self._error: BaseException | None = None
        self._resume = threading.Semaphore(0)
        self._parked = threading.Semaphore(0)
        threading.Thread(target=self._live, name="injector", daemon=True).start()

    def __repr__(self) -> str:
        return f"<FaultInjector at {self.place}>"

    @property
    def alive(self) -> bool:
        return self.place != "ended"

    @property
    def has_batch(self) -> bool:
        """Say whether it waits with a batch in its hand."""
        return self.place in ("claimed", "send", "published_not_deleted")

    @property
    def trusts_itself(self) -> bool:
        """Say whether it would publish rows of the shards in ``holder.owned``."""
        holder = self.drain.holder if self.alive and self.drain else None
        return bool(holder and holder.joined and holder.remaining >= 0)

    def go(self, plan: Plan | None = None) -> None:
        """Let it run to the end of its turn, or as its plan says."""
        self._plan = plan
        self.has_met_its_plan = False
        self._resume.release()
        parked = self._parked.acquire(timeout=STUCK_SECONDS)
        assert parked, f"{self} has gone on, and hangs; its latest statement: {self._latest}"
        if self._error is not None:
            raise self._error

    def stop(self, plan: Plan | None = None) -> None:
        """Stop it as SIGTERM does, and let it run to its end, or as its plan says."""
        if self.drain:
            self.drain.stop()
            self.go(plan)
        else:
            self.kill()

    def kill(self) -> None:
        """End it where it is."""
        if self.alive:
            self._killed = True
            self.go()

    def operation(
        self, kind: str, do: Callable[[], Any], failure: type[Exception], verb: str = ""
    ) -> Any:
        """Do something of the drainer's, unless the plan says otherwise."""
        if self._killed:
            raise Killed
        if kind == "deleted":
            self.behind = 0.0
        action = self._action(kind, verb)
        if action == "pause":
            self._park(kind)
        elif action == "kill":
            self._killed = True
            raise Killed
        return _let_down(action, do, failure)

    def _action(self, *names: str) -> str | None:
        plan = self._plan
        if plan is None or plan.where not in names:
            return None
        if plan.nth > 1:
            self._plan = plan._replace(nth=plan.nth - 1)
            return None
        if plan.action == "pause" and not connections[self.using].get_autocommit():
            return None
        self._plan = None
        self.has_met_its_plan = True
        return plan.action

    def _park(self, place: str) -> None:
        self.place = place
        self._parked.release()
        self._resume.acquire()
        if self._killed:
            raise Killed

    def _live(self) -> None:
        self._resume.acquire()
        connection = connections[self.using]
        try:
            if not self._killed:
                _here.injector = self
                _intercept_operations(self, connection)
                self.drain = Drain(using=self.using, on_turn=self._between_turns, **self.options)
                self.drain.holder.clock = lambda: self.clock() - self.behind
                self.drain._waiter = _NoWaiting()  # type: ignore[assignment]
                # After a failed turn, too, no time passes but the virtual one.
                stop = self.drain._stop
                stop.wait = lambda seconds: stop.is_set()  # type: ignore[method-assign]
                with connection.execute_wrapper(self._statement):
                    self.drain.run()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            connection.close()
            self.place = "ended"
            self._parked.release()

    def _between_turns(self, drain: Drain) -> None:
        self.behind = 0.0
        if not drain._stop.is_set():
            self._plan = None
            self._park("turn")

    def _statement(self, execute: Callable[..., Any], *args: Any) -> Any:
        self._latest = args[0]
        verb = self._latest.split()[0]
        return self.operation("sql", lambda: execute(*args), OperationalError, verb)


class Committer:
    """A process that commits in the block, and sends what it committed. It has no id.

    Args:
        plan: What happens to it then.
    """

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan

    def __enter__(self) -> None:
        _here.injector = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        del _here.injector
        return kind is Killed

    def operation(self, kind: str, do: Callable[[], Any], failure: type[Exception]) -> Any:
        """Do something of it, unless the plan says otherwise."""
        action = ""
        if self._plan and self._plan.where == kind:
            action, self._plan = self._plan.action, None
        if action == "kill":
            raise Killed
        return _let_down(action, do, failure)


def _let_down(action: str | None, do: Callable[[], Any], failure: type[Exception]) -> Any:
    if action == "fail":
        raise failure("failed on purpose, before it took effect")
    result = do()
    if action == "lose":
        raise failure("failed on purpose, after it took effect")
    return result


def operation(kind: str, do: Callable[[], Any], failure: type[Exception]) -> Any:
    """Do something of the process that runs in this thread, if one does."""
    injector: FaultInjector | Committer | None = getattr(_here, "injector", None)
    return injector.operation(kind, do, failure) if injector else do()


def sender() -> str:
    """Return the id of the drainer that runs in this thread; nothing for a committer."""
    return "" if isinstance(_here.injector, Committer) else str(_here.injector.drain.holder.id)


def set_failpoints(*, on: bool) -> None:
    """Make the failpoints operations of whichever process passes them."""
    for name in (*FAILPOINTS, *IMMEDIATE):
        set_failpoint(name, _failpoint(name) if on else None)


def _failpoint(name: str) -> Callable[[], None]:
    return lambda: operation(name, lambda: None, OperationalError)


def _intercept_operations(injector: FaultInjector, connection: Any) -> None:
    commit = connection._commit
    connection._commit = lambda: injector.operation("commit", commit, OperationalError)


class _NoWaiting:
    def wait(self, seconds: float) -> bool:
        return False

    def close(self) -> None:
        pass
