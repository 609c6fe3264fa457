"""Shows prepared events, has their senders asked, and decides events that remain in doubt. Run it on
the keeper, except for answer.

  list              show open events, undecided ones first; --state shows another state
  show ID           show an event with its content, as JSON; events of several senders, if more
                    than one has this id
  check ID...       have manage.py run_prepared ask the sender now
  confirm ID...     publish events. Needs a --reason. This is a guess, unless you know that the
                    sender's transaction has committed: if it was rolled back, the event never
                    happened
  cancel ID...      never publish the events. Needs a --reason. This is a guess, unless you know
                    that the transaction was rolled back: if it has committed, its event is lost
  extend ID...      ask the senders for another day. Needs a --reason. Undecided events are
                    prepared again
  answer KEEPER     on a sender that its keeper cannot call: fetch our open events from this peer,
                    and send it the outcomes in the fences. Run it about every minute
  prune             remove events decided 30 days ago, as manage.py outbox_prune --prepared does

Instead of ids, --sender NAME selects all undecided events of a sender, and --state STATE the events
in a state. Events decided meanwhile do not change. If a sender's later answer contradicts your
decision, an incident records the contradiction.

  manage.py outbox_prepared list --sender alias:billing --json
  manage.py outbox_prepared confirm 0190163d-8694-739b-aea5-966c26f8ad91 --reason "invoice 17 is paid"
  manage.py outbox_prepared cancel --sender alias:billing --reason "restored to before" --noinput

Exit codes: 0 done; 1 no event matches, not confirmed, an event could not be decided, or the keeper
gave no answer; 2 wrong arguments, or no tables.
"""  # noqa: E501

from __future__ import annotations

from argparse import ArgumentTypeError
from functools import partialmethod
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser
from django.db.models.expressions import RawSQL

from ....aliases import outbox_alias
from ....exceptions import InvalidArgument
from ....management.base import OUTBOX_ALIAS, OutboxCommand, when
from ....models.counting import LISTED, counted, shown_count
from ....process.preflight import require_migrated
from ....retention.rows import prune
from ....text import one_line
from ... import operations
from ...models import PreparedEvent

State = PreparedEvent.State
RISKS = {
    State.CONFIRMED: "If a sender's transaction was rolled back, its event never happened.",
    State.CANCELLED: "If a sender's transaction has committed, its event is lost.",
}


def event_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not the id of an event; ids are UUIDs") from None


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        decisions, changes = "confirm cancel extend", "check confirm cancel extend"
        every = f"list show {changes} answer prune"
        parsers = {name: actions.add_parser(name) for name in every.split()}

        def add(actions: str, *names: str, **options: Any) -> None:
            for each in actions.split():
                parsers[each].add_argument(*names, **options)

        add("answer", "keeper", metavar="KEEPER", help="name of the peer")
        add("show", "id", type=event_id, metavar="ID", help="id of the event")
        add(changes, "ids", type=event_id, nargs="*", metavar="ID", help="ids of events")
        sender = "events of this sender, such as alias:billing"
        add(f"list {changes}", "--sender", metavar="NAME", help=sender)
        state = "events in this state (default: open events; without ids, undecided events)"
        add(f"list {changes}", "--state", choices=State.values, help=state)
        add("list", "--json", action="store_true", help="as JSON")
        why = "why; kept with the event"
        add(decisions, "--reason", required=True, metavar="TEXT", help=why)
        for each in decisions.split():
            self.add_no_input(parsers[each])
        add(every.replace("answer ", ""), "--database", metavar="ALIAS", help=OUTBOX_ALIAS)

    def handle(self, *, action: str, database: str | None = None, **options: Any) -> None:
        if not options.get("reason", "-").strip():
            raise InvalidArgument("--reason is empty. Say why: the reason is kept with the events.")
        using = database or outbox_alias()
        require_migrated(using, PreparedEvent)
        getattr(self, f"_{action}")(using=using, **options)

    def _list(self, *, using: str, sender: str | None, state: str | None, **options: Any) -> None:
        states = [state] if state else [State.UNDECIDED, State.PREPARED]
        chosen_rows = [operations.selected(using=using, sender=sender, state=s) for s in states]
        found = [operations.described(row) for rows in chosen_rows for row in rows[:LISTED]]
        if options["json"]:
            self.write_json(found)
            return
        for each in found:
            times = (when(each[name], using=using) for name in ("prepared_at", "decide_by"))
            what = f"{one_line(each['type'], 80)} {one_line(each['stream'], 80)}"
            self.write(f"{each['state']:<9}  {each['event_id']}  {what}")
            self.write(
                f"           {each['sender']}, prepared {', decided by '.join(times)} "
                f"({each['policy']}); asked {each['asked']}, answered {each['answered']}, "
                f"not answered {each['unreachable']}"
            )
            for name in filter(each.get, ("last_answer", "reason")):
                self.write(f"           {name} {one_line(each[name], 200)}")
        for name, rows in zip(states, chosen_rows, strict=True):
            self.write(f"{name} {shown_count(counted(rows))}")

    def _show(self, *, using: str, id: UUID, **options: Any) -> None:
        rows = operations.selected(using=using, ids=[id])[:LISTED]
        if not rows:
            raise CommandError(f"There is no prepared event {id} on {using!r}.")
        self.write_json([operations.described(row, "content") for row in rows])

    def _check(self, **options: Any) -> None:
        count = operations.check(self._selected(**options))
        self.write(f"manage.py run_prepared asks the senders about {_events(count)}.")

    def _extend(self, **options: Any) -> None:
        events = self._selected(**options)
        if options["interactive"]:
            self.confirm(f"Extend {_events(counted(events))}?")
        count = operations.extend(events, by=self.user, reason=options["reason"])
        self.write(f"Extended {_events(count)}.")

    def _decide(self, verb: str, outcome: State, *, reason: str, **options: Any) -> None:
        events = self._selected(**options)
        if options["interactive"]:
            self.confirm(f"{verb} {_events(counted(events))}? {RISKS[outcome]}")
        decided, failed = operations.decide(
            events, outcome, by=self.user, reason=reason, write=self.write
        )
        self.write(f"{outcome.capitalize()} {_events(decided)}.")
        if failed:
            listed = "\n".join(failed)
            raise CommandError(f"These were not {outcome}:\n{listed}")

    _confirm = partialmethod(_decide, "Confirm", State.CONFIRMED)
    _cancel = partialmethod(_decide, "Cancel", State.CANCELLED)

    def _answer(self, *, keeper: str, **options: Any) -> None:
        done = operations.answer(keeper, write=self.write)
        if done["contradiction"]:
            raise CommandError("Some events had been decided differently. They were not changed.")

    def _prune(self, *, using: str, **options: Any) -> None:
        prune("prepared", using, write=self.write)

    def _selected(
        self, *, using: str, ids: list[UUID], sender: str | None, state: str | None, **options: Any
    ) -> Any:
        if not (ids or sender or state):
            raise InvalidArgument("Nothing is selected. Give ids, --sender or --state.")
        state = state or (None if ids else State.UNDECIDED)
        events = operations.selected(using=using, ids=ids, sender=sender, state=state).open()
        if not events.exists():
            raise CommandError("No open event matches. Nothing was changed.")
        if ids and not sender and counted(events) > len(set(ids)):
            raise InvalidArgument("Several senders have an event with this id. Add --sender.")
        if options.get("interactive"):  # the answer is about these, and none that comes meanwhile
            keys = ",".join(map(str, [0, *events.values_list("pk", flat=True)]))
            events = events.filter(pk__in=RawSQL(keys, ()))  # parameters have a limit
        return events


def _events(count: int) -> str:
    return f"{shown_count(count)} prepared event{'' if count == 1 else 's'}"
