"""Commands of one entity in one transaction: load, look up, run, compare and set, record.

A batch of N does what N batches of one would do. Command ids are looked up *after* the version is
read: a duplicate that commits later moves the version, so the compare-and-set of the head changes
no row, and ``transaction`` repeats the attempt. The unique index on (stream, command_id) is the
backstop. The head is always locked first: two orders would deadlock.

A command that changes a column with a unique index is the last of its transaction. If the index
refuses the row, the attempt is repeated, and only this command is rejected.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import QuerySet
from django.db.models.base import ModelState

from ..database.lock_wait import is_conflict, is_lock_timeout
from ..events.exceptions import VersionConflict
from ..events.log.heads import add_versions, bump_versions, current_version
from ..events.models import StreamHead
from ..failpoints import failpoint
from .declaration import REJECTED, CommandSpec, Rejected, spec_of
from .exceptions import DamagedEntity, InvalidCommand, UnknownEntity
from .handlers import Handled, HeldEffects, handle, stored_rejection
from .pruned import pruned_answer
from .request import Call, Outcome, Rejection, Undone, ends_thread, stored_answer
from .store import ANSWER, answered, load, update, write_versions


class Moved(Exception):
    """Repeat the attempt: another transaction was first, or an index refused the row."""


def _hold(stream: tuple[str, str], versions: list[int]) -> None:
    """Do nothing. In run_on_commit it marks hidden versions, as long as its savepoint exists."""


class Batch:
    """Answers commands of one entity, in their order, in the open transaction.

    With ``locked`` it locks the head first: no other command changes the entity meanwhile. ``wait``
    bounds each wait for a lock, in seconds. With None the transaction's own bound holds.
    """

    def __init__(
        self, entity: Any, calls: Sequence[Call], *, using: str, locked: bool, wait: float | None
    ) -> None:
        self.entity, self.calls, self.using = entity, calls, using
        self.locked, self.wait = locked, wait
        self.id = calls[0].id
        self.name = f"{entity.__name__} {self.id!r}"
        self.types = spec_of(entity)
        self.table = entity.versions._meta.db_table
        self.connection = connections[using]
        self.ids = {call.command_id for call in calls}
        self.effects = HeldEffects(using=using)
        #: Calls whose versions are written, and calls whose versions are still to be written.
        self.steps: list[Call] = []
        self.unwritten: list[Call] = []
        #: By command id: the hash of the request, the command's name (None if the version is
        #: pruned), and the answer.
        self.answered: dict[str, tuple[str, str | None, Outcome]] = {}
        #: The command that ends the transaction, because an index may refuse its change.
        self.last: Call | None = None
        #: False from a handler's end until its version is recorded: only a signal raises then.
        self.sound = True
        #: Versions that the snapshot of the caller's transaction hides.
        self.hidden: list[int] = []

    @property
    def version(self) -> int:
        return self.loaded + len(self.steps) + len(self.unwritten)

    def run(self) -> list[Call]:
        """Answer as many calls as this transaction may; return the others.

        Callers may see their answers only after the commit. Raises ``Moved`` if the transaction
        must be rolled back and repeated, and ``DamagedEntity``.
        """
        with self.connection.cursor() as self.cursor:
            head = self._lock() if self.locked else None
            self._load(head)
            failpoint("entity_loaded")
            self._look_up()
            self.is_damaged = self.locked and self.version != head
            left = self._handle_all()
            while left and self.last is None:  # the next one runs apart: write those before it
                self._write()
                self.calls = left
                left = self._handle_all()
            failpoint("entity_handled")
            if self.unwritten:
                self._write()
            if self.steps:
                failpoint("entity_written")
            else:  # keep nothing, not even a head that was inserted to be locked
                transaction.set_rollback(True, using=self.using)
            return left

    def _lock(self) -> int:
        """Lock the head; return its version."""
        heads = StreamHead.objects.using(self.using).filter(log=self.table, stream=self.id)
        writes = self.connection.vendor == "sqlite"  # only a write locks, and only before a read
        seen = 0 if writes else heads.values_list("version", flat=True).first() or 0
        if not seen:
            # Insert a head that does not exist. SELECT FOR UPDATE would lock a gap, in which other
            # transactions insert, and would not block another creator.
            bump_versions(self.table, {self.id: 0}, {}, using=self.using)
        head = heads.select_for_update().values_list("version", flat=True).get()
        if self.wait is None and self.connection.vendor == "mysql":
            self._note_hidden(list(range(seen + 1, head + 1)))
        return head

    def _note_hidden(self, versions: list[int]) -> None:
        """Add these versions, and those that earlier commands have noted, to ``hidden``."""
        # Once this transaction has written the head, its snapshot shows it: ``versions`` is empty.
        stream = self.table, self.id
        if versions:
            transaction.on_commit(partial(_hold, stream, versions), using=self.using)
        for _, callback, *_ in self.connection.run_on_commit:
            held = callback.args if isinstance(callback, partial) and callback.func is _hold else ()
            if held[:1] == (stream,):
                self.hidden += held[1]

    def _load(self, head: int | None) -> None:
        # At REPEATABLE READ a plain SELECT on MySQL would show an old version.
        lock = bool(head) and self.connection.vendor == "mysql"
        options: Any = {"lock": lock, "wait": self.wait, "ids": self.ids}
        read = partial(load, self.cursor, self.entity, self.id, **options)
        self.now, values, self.text, self.found = read()
        if values is None and head is None:
            head = current_version(self.table, self.id, using=self.using)
            if head:  # another command may have created it between the two statements
                self.now, values, self.text, self.found = read()
        self.existed = values is not None
        if values is not None and isinstance(values["id"], str) and values["id"] != self.id:
            raise DamagedEntity(
                f"The table {self.entity._meta.db_table} on {self.using!r} does not distinguish "
                f"{self.id!r} from {values['id']!r}: its column id does not compare byte by byte. "
                "Nothing was written. Run manage.py makemigrations and migrate, and then "
                f"manage.py check --database {self.using}."
            )
        self.values = values or self.entity(pk=self.id, version=head, state=None).__dict__
        self._fresh = None
        #: The version that was read, which the compare-and-set expects.
        self.loaded = int(self.values["version"])

    def _look_up(self) -> None:
        found, ids = self.found, self.ids
        if found is None:  # read after the state, never before it
            found = answered(self.cursor, self.entity.versions, self.id, ids)
        if self.hidden and len(found) < len(ids):
            # Read with a lock, by versions that exist: a lock on a command id that does not exist
            # would lock a gap.
            rows: Any = QuerySet(self.entity.versions, using=self.using)
            newer = rows.filter(stream=self.id, version__in=self.hidden).select_for_update()
            found += [row for row in newer.values_list(*ANSWER) if row[0] in ids]
        for id, hash, command, version, rejected, response in found:
            self.answered[id] = hash, command, stored_answer(version, rejected, response)

    def _handle_all(self) -> list[Call]:
        number = 0
        with self.effects.without_statements():
            while number < len(self.calls) and self.last is None:
                spec = self.types.commands.get(self.calls[number].command)
                # An index refused its row, maybe because of an earlier command: write those first.
                apart = self.calls[number].refused or (spec and spec.atomic)
                if apart and self.unwritten:
                    break
                run = self._run_of_batch(number)
                if len(run) > 1 and self._handle_run(run):
                    number += len(run)
                    continue
                self._answer(self.calls[number])
                number += 1
        return list(self.calls[number:])

    def _answer(self, call: Call) -> None:
        began = time.monotonic()
        try:
            call.answer = self._known(call) or self._handle(call)
        except BaseException as error:
            call.answer = error
            failpoint("entity_raised")
            if not self.sound or ends_thread(error, [call]):
                raise
            spec = self.types.commands.get(call.command)
            conflicts = is_conflict(error) and spec is not None and spec.atomic
            waited = conflicts and is_lock_timeout(error) and self._has_waited(call, began)
            if self.connection.needs_rollback:
                if not is_conflict(error) and isinstance(error, Exception):
                    raise  # the connection is lost, say
            elif not conflicts or (is_lock_timeout(error) and not waited):
                return  # its savepoint has undone it
            raise Undone(error, call, waited=waited) from error

    def _has_waited(self, call: Call, began: float) -> bool:
        """Return whether a call has used up its wait for a lock, and has time for another one."""
        wait = inf if self.wait is None else self.wait
        return time.monotonic() - began >= wait and call.seconds_left > 0

    def _known(self, call: Call) -> Outcome | None:
        known = self.answered.get(call.command_id)
        if known is None:
            return None
        hash, command, outcome = known
        if command is None:
            raise pruned_answer(call, outcome.version)
        if hash != call.hash:
            raise call.conflict(command, outcome.version)
        call.is_replay = outcome.version <= self.loaded
        # Each caller gets a copy of its own, which it may change.
        return replace(outcome, response=deepcopy(outcome.response), replayed=True)

    def _handle(self, call: Call) -> Outcome:
        if self.is_damaged:
            raise self._damaged()
        spec = self.types.commands.get(call.command)
        if spec is None:
            raise InvalidCommand(
                f"{self.entity.__name__} has no command {call.command!r}. It has: "
                f"{', '.join(sorted(self.types.commands)) or 'none'}."
            )
        spec.check(call.arguments)
        if call.expected not in (None, self.version):
            raise VersionConflict(
                f"{self.name} was expected at version {call.expected}; it is at version "
                f"{self.version}. Read it again, decide again, and send it with the version you "
                "have seen.",
                stream=call.id,
                current=self.version,
            )
        if self.text is None and not spec.creates:
            text = f"There is no {self.name}, and the command {spec.name!r} does not create one."
            raise UnknownEntity(text)
        try:
            if self.text is not None and spec.creates:
                raise Rejected(f"{self.name} exists already.", code="exists")
            with self.effects.of(call, spec):
                handled = handle(self.types, spec, self._instance(), [call], self.effects)
                self.sound = False
            [(answer, text)] = handled.answers
            if self._changes_unique(handled) or (self.types.unique and self.text is None):
                self.last = call
            self._keep(handled)
        except Rejected as error:
            answer, text = call.run(stored_rejection, spec.full_name, error, self.using)
        if call.refused:
            self.last = call
        return self._step(call, spec, answer, text)

    def _handle_run(self, run: list[Call]) -> bool:
        """Let a batch handler answer several commands at once; return whether it could."""
        spec = self.types.commands[run[0].command]
        try:
            with self.effects.of(run[0], spec):
                handled = handle(self.types, spec, self._instance(), run, self.effects)
                if self._changes_unique(handled):
                    raise Moved  # each command must end its batch
                self.sound = False
        except BaseException as error:
            if not self.sound or ends_thread(error, run):
                raise
            for call in run:
                call.alone = True
            return False
        self._keep(handled)
        for call, (answer, text) in zip(run, handled.answers, strict=True):
            call.answer = self._step(call, spec, answer, text)
        return True

    def _instance(self) -> Any:
        # Faster than __init__(). Attributes that a handler sets do not reach the next handler.
        instance, state = self.entity.__new__(self.entity), ModelState()
        state.adding = self.text is None
        instance.__dict__ = {
            **self.values,
            **{name: deepcopy(self.values[name]) for name in self.types.fields},
            "_state": state,
            "now": self.now,
            "version": self.version,
            "state": json.loads(self.text or "null") if self._fresh is None else self._fresh,
        }
        self._fresh = None
        return instance

    def _changes_unique(self, handled: Handled) -> bool:
        values = {**self.values, "state": self.text}
        columns = values | handled.columns | {"state": handled.text}
        return any(columns[name] != values[name] for name in self.types.unique)

    def _keep(self, handled: Handled) -> None:
        self.text, self._fresh = handled.text, handled.state
        self.values |= handled.columns
        if not all(isinstance(answer, Rejection) for answer, _ in handled.answers):
            self.values["changed_at"] = self.now

    def _step(self, call: Call, spec: CommandSpec, answer: Any, text: str) -> Outcome:
        self.sound = False
        rejection = answer if isinstance(answer, Rejection) else None
        call.rejected, call.version = rejection is not None, self.version + 1
        call.type = spec.event + REJECTED if rejection else spec.event
        call.response, call.state = text, self.text
        self.unwritten.append(call)
        outcome = Outcome(None if rejection else answer, call.version, rejection, replayed=False)
        self.answered[call.command_id] = call.hash, call.command, outcome
        self.sound = True
        return outcome

    def _write(self) -> None:
        step = None  # the version that goes with its head and its row, by one statement
        if self.connection.vendor == "postgresql" and self.existed and len(self.unwritten) == 1:
            [step] = self.unwritten
        self.has_row = False
        with self._blaming_one():
            try:
                self._write_entity(step)
            except IntegrityError as error:
                if self.last is None or self.last.refused[1:]:
                    raise
                self.last.refused += (error,)
                raise Moved from error
            self.has_row = True
            write_versions(self.cursor, self.entity, self.unwritten, inserted=step is not None)
            self.effects.write()
        self.steps += self.unwritten
        self.unwritten, self.existed = [], self.text is not None

    @contextmanager
    def _blaming_one(self) -> Iterator[None]:
        """Raise ``Undone`` for an error of the block that one command of several has caused."""
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            # All need the head and the row; only one a unique value, or the stream of its event.
            single = self.unwritten[0] if len(self.unwritten) == 1 else None
            one = single if self.has_row else self.last
            blames = self.locked or (self.has_row and is_lock_timeout(error))  # else: try again
            conflicts = blames and is_conflict(error) and (self.has_row or one is not None)
            ends = not isinstance(error, Exception) and not ends_thread(error, self.unwritten)
            if not (conflicts or ends):
                raise
            one = one if conflicts else None
            raise Undone(error, one, waited=bool(one and self._has_waited(one, began))) from error

    def _write_entity(self, step: Call | None) -> None:
        count, at = len(self.unwritten), self.loaded + len(self.steps)
        columns: dict[str, Any] = {}
        if not all(step.rejected for step in self.unwritten):
            own = self.types.fields if self.types.derives_columns or not self.existed else ()
            columns = {"state": self.text, "changed_at": self.now}
            columns |= {name: self.values[name] for name in own}
        if self.existed:
            done: Any = update(self.cursor, self.entity, self.id, at, count, columns, step=step)
        elif self.locked or at:
            done = add_versions(self.cursor, self.table, self.id, count, at=at)
        else:
            done = bump_versions(self.table, {self.id: count}, {self.id: 0}, using=self.using)
        if not done:
            raise self._damaged() if self.locked else Moved
        if columns and not self.existed:
            columns["state"] = json.loads(columns["state"])
            rows: Any = QuerySet(self.entity, using=self.using)
            rows.bulk_create([self.entity(pk=self.id, version=self.version, **columns)])

    def _run_of_batch(self, start: int) -> list[Call]:
        """Return the calls, from ``start`` on, that a batch handler may answer together."""
        alike = attrgetter("command", "language", "zone")  # texts of the handler depend on them
        first = alike(self.calls[start])
        spec = self.types.commands.get(first[0])
        takes = spec is not None and spec.batch and self.entity.states == "last"
        if not takes or self.text is None or self.is_damaged:
            return []
        run: dict[str, Call] = {}
        for call in self.calls[start:]:
            fits = alike(call) == first and call.expected is None
            known = call.command_id in self.answered or call.command_id in run
            if not fits or known or call.alone or call.refused:
                break
            run[call.command_id] = call
        return list(run.values())

    def _damaged(self) -> DamagedEntity:
        return DamagedEntity(
            f"The row of {self.name} is at version {self.loaded}, which is not its newest version: "
            "it was edited by hand. Nothing was written. Run manage.py outbox_entities verify."
        )
