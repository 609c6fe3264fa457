"""Shows, pauses, resumes, replays and repairs subscriptions.

  list                      the position of each, how far behind it is, its error (--json: all)
  pause NAME                handle no event from the moment this command has ended
  resume NAME               continue after a pause, or after TransactionEnded
  replay NAME --from PLACE  handle events again from a place in the log: beginning, now, a position
                            (the events after it), or a time such as 2026-01-31T12:00. A move that
                            would pass over events not yet handled needs --skip-ahead
  reset NAME                replay from the beginning
  release NAME              handle parked streams from their first parked event on: --stream S, or
                            --all
  skip NAME --position N --reason TEXT
                            never handle the event that it fails at (see list), or the first event
                            of a parked stream; later events are handled
  discard NAME --stream S --reason TEXT
                            never handle the parked events of a stream; later events are handled
  count NAME                compare the events in the logs with the events handled since the first
                            count; --restart starts a new count
  gaps [NAME]               gaps that are still open, with their ids for skip-gap
  skip-gap ID --reason TEXT give up a gap: its stream continues without the missing events
  repartition NAME          change to the number of partitions that the code declares
  forget NAME               delete the cursors of a subscription that the code no longer declares,
                            so that outbox_prune does not wait for it

  manage.py outbox_subscriptions list
  manage.py outbox_subscriptions replay shop-stock --from 2026-01-31T12:00 --dry-run
  manage.py outbox_subscriptions release shop-stock --stream order-17

A replay does not undo what a subscription has written: its handler gets the events again. Parked
streams whose events are all replayed are no longer parked, the others stay parked. You need not
stop processes that run: they notice the change within a fifth of their lease.

Exit codes: 0 done; 1 refused, or nothing matched, and nothing was changed; or count found a
difference; 2 wrong arguments, no such subscription or log, or no tables.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from ...aliases import log_alias
from ...exceptions import InvalidArgument, InvalidSubscriber, OutboxError, ReadRefused
from ...models import Event
from ...models.counting import LISTED
from ...process.preflight import require_migrated
from ...subscriptions import control, counting
from ...subscriptions.lag import SubscriptionLag, in_flight, lags
from ...subscriptions.skips import discard_stream, list_gaps, skip_event, skip_gap
from ...subscriptions.start_point import parse_start_point
from ...text import one_line
from ..teaching import TeachingCommand, when

EXIT_REFUSED = 1
ACTIONS = (
    *("list", "pause", "resume", "replay", "reset", "release", "skip", "discard", "count"),
    *("gaps", "skip-gap", "repartition", "forget"),
)
#: By option, the actions that take it. Every other action refuses it.
TAKEN_BY = {
    **dict.fromkeys(("dry_run", "skip_ahead"), ("replay", "reset")),
    "log": ("replay", "reset", "skip", "discard"),
    "stream": ("release", "discard"),
    **{"position": ("skip",), "all": ("release",), "restart": ("count",)},
    **{"json": ("list", "count"), "reason": ("skip", "discard", "skip-gap", "replay")},
}


class Command(TeachingCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        add = parser.add_argument
        add("action", choices=ACTIONS, help="see above")
        add("name", nargs="?", metavar="NAME", help="the subscription, or a gap's ID")
        add("--from", dest="place", metavar="PLACE", help="where to replay from")
        add("--log", help="in this log only (default: all that it reads)")
        ahead = "replay: pass over events that were not handled; asks first, and records a gap"
        add("--skip-ahead", action="store_true", help=ahead)
        self.add_no_input(parser)
        add("--stream", metavar="S", help="release, or discard, this stream")
        add("--position", type=int, metavar="N", help="position of the event to skip")
        add("--all", action="store_true", help="release all parked streams")
        add("--reason", metavar="TEXT", help="why something is skipped; kept with it")
        add("--restart", action="store_true", help="count: the next count begins with this one")
        add("--json", action="store_true", help="list, or count, as JSON")
        add("--dry-run", action="store_true", help="print the moves, and change nothing")
        alias = "alias of the logs (default: the subscription's; for list: that of Event)"
        add("--database", metavar="ALIAS", help=alias)

    def handle(self, *, action: str, name: str | None, **options: Any) -> None:
        using = options["database"]
        for option, actions in TAKEN_BY.items():
            if options[option] and action not in actions:
                raise InvalidArgument(f"{action} takes no --{option.replace('_', '-')}.")
        if action not in ("list", "gaps") and not name:
            raise InvalidArgument(f"Which one? {action} needs a NAME, or an ID.")
        if (action == "replay") != (options["place"] is not None):
            raise InvalidArgument("replay needs --from, and no other action takes it.")
        if action == "release" and (options["stream"] is None) != options["all"]:
            raise InvalidArgument("release needs --stream or --all.")
        if action == "skip-gap" and not (
            re.fullmatch(r"[0-9]{1,19}", name or "") and options["reason"]
        ):
            raise InvalidArgument("skip-gap needs the ID of a gap, a whole number, and a --reason.")
        needed = {"skip": "position", "discard": "stream"}.get(action)
        if needed and (options[needed] is None or not options["reason"]):
            raise InvalidArgument(f"{action} needs --{needed} and --reason.")
        using = using or (control.alias_of(name) if name else log_alias(Event))
        require_migrated(using)
        getattr(self, f"_{action.replace('-', '_')}")(name, using=using, **options)

    def exit_code(self, error: OutboxError) -> int:
        """Return 1 also if a log cannot be read or a subscription cannot run: nothing has moved."""
        if isinstance(error, ReadRefused | InvalidSubscriber):
            return EXIT_REFUSED
        return error.returncode

    def _list(self, name: str | None, *, using: str, **options: Any) -> None:
        found = lags(using=using, names=[name] if name else None)
        if name and not found:
            raise InvalidArgument(
                f"No subscription {name!r} is declared on {using!r}, and none has run."
            )
        flight = in_flight(using=using)
        if options["json"]:
            holders = {
                table: {"denied": each.denied, "holders": [asdict(h) for h in each.transactions]}
                for table, each in flight.items()
            }
            self.write_json({"subscriptions": list(map(_as_json, found)), "in_flight": holders})
            return
        if not found:
            self.write(f"No subscription is declared on {using!r}, and none has run.")
            return
        self.write(
            f"{'name':<24} {'state':<8} {'parts':>5} {'position':>10} {'handled':>10} "
            f"{'behind':>9} {'late':>8} {'parked':>6} {'gaps':>5}"
        )
        for lag in found:
            logs = len({each.cursor.log for each in lag.cursors})
            position = lag.position if logs < 2 else "-"  # each log has positions of its own
            self.write(
                f"{one_line(lag.name, 80):<24} {lag.state:<8} {lag.partitions:>5} "
                f"{position:>10} {lag.handled:>10} {lag.shown:>9} {lag.oldest_seconds:>7.0f}s "
                f"{lag.parked:>6} {lag.gaps:>5}"
            )
            if not lag.declared:
                self.write("  not declared in the code")
            if lag.error not in ("", *(each.cursor.error for each in lag.cursors)):
                self.write(f"  {one_line(lag.error, 300)}")
            for cursor in (each.cursor for each in lag.cursors):
                if cursor.error:
                    error = one_line(cursor.error, 300)
                    self.write(f"  {cursor.log}[{cursor.partition}]: {error}")
                if failed := cursor.failed_event:
                    self.write(
                        f"  fails at position {failed['position']}: "
                        f"{one_line(failed['type'], 100)} {one_line(failed['stream'], 200)} "
                        f"version {failed['version']}{' (skipped)' if 'skip' in failed else ''}"
                    )
        for table, held in flight.items():
            for holder in held.transactions:
                self.write(f"in flight on {table}: {one_line(holder, 300)}")
            if held.denied:
                self.write(f"in flight on {table}: not permitted to see. {held.denied}")

    def _pause(self, name: str, *, using: str, **options: Any) -> None:
        control.pause(name, using=using)
        self.write(f"Paused {name}: it handles no event.")

    def _resume(self, name: str, *, using: str, **options: Any) -> None:
        control.resume(name, using=using)
        self.write(f"Resumed {name}.")

    def _replay(self, name: str, *, place: str | None, using: str, **options: Any) -> None:
        try:
            where = parse_start_point("beginning" if place is None else place)
        except OutboxError as error:
            raise InvalidArgument(str(error)) from error
        moves = control.plan(name, where, log=options["log"], using=using)
        for move in moves:
            self.write(f"{name} moves in {move}.")
        if options["dry_run"]:
            self.write("Nothing was done.")
            return
        if options["skip_ahead"] and options["interactive"] and any(each.passes for each in moves):
            self.confirm("Skip these events?")
        given = {key: options[key] for key in ("log", "skip_ahead")}
        reason = options["reason"] or ""
        control.replay(name, where, by=self.user, reason=reason, using=using, **given)
        self.write("Done.")

    _reset = _replay

    def _release(self, name: str, *, using: str, **options: Any) -> None:
        streams = None if options["all"] else [options["stream"]]
        count = control.release(name, streams, using=using)
        self.write(f"Released {count} {'stream' if count == 1 else 'streams'}.")
        if not count:
            raise SystemExit(EXIT_REFUSED)

    def _skip(self, name: str, *, using: str, position: int, **options: Any) -> None:
        given = {key: options[key] for key in ("reason", "log")}
        skip_event(name, position, by=self.user, using=using, **given)
        self.write(f"{name} skips position {position}.")

    def _discard(self, name: str, *, using: str, stream: str, **options: Any) -> None:
        given = {key: options[key] for key in ("reason", "log")}
        gap = discard_stream(name, stream, by=self.user, using=using, **given)
        self.write(f"{name} skips {one_line(gap, 300)}.")

    def _count(self, name: str, *, using: str, restart: bool, json: bool, **options: Any) -> None:
        counts = counting.count_events(name, restart=restart, using=using)
        if json:
            self.write_json([asdict(each) | {"difference": each.difference} for each in counts])
        for each in [] if json else counts:
            if not each.since:
                self.write(f"{each.log}: counting from now on")
                continue
            self.write(
                f"{each.log}: published {each.published}, handled {each.handled}, parked "
                f"{each.parked}, skipped {each.skipped}, difference {each.difference}, "
                f"since {each.since}"
            )
            for part, first, last, difference in each.uneven:
                self.write(f"  partition {part}, position {first} to {last}: {difference}")
        if any(each.uneven for each in counts):
            raise SystemExit(EXIT_REFUSED)

    def _gaps(self, name: str | None, *, using: str, **options: Any) -> None:
        found = list(list_gaps(using=using, subscription=name)[: LISTED + 1])
        if not found:
            self.write("No gap is open.")
        for gap in found[:LISTED]:
            self.write(
                f"{gap.id:>8}  {when(gap.seen_at, using=using)}  "
                f"{one_line(gap.subscription, 80) or 'an audit'} {gap.log} "
                f"{one_line(gap.stream, 200) or 'positions'} {gap.first}-{gap.last}, "
                f"looked for {gap.attempts} times"
            )
        if len(found) > LISTED:
            self.write(f"There are more. Shown: the oldest {LISTED}.")

    def _skip_gap(self, id: str, *, using: str, **options: Any) -> None:
        gap = skip_gap(int(id), by=self.user, reason=options["reason"], using=using)
        self.write(f"Skipped: {one_line(gap, 300)}")

    def _repartition(self, name: str, *, using: str, **options: Any) -> None:
        before, after = control.repartition(name, using=using)
        noun = "partition" if after == 1 else "partitions"
        self.write(f"{name} has {after} {noun} (before: {before}).")

    def _forget(self, name: str, *, using: str, **options: Any) -> None:
        control.delete_subscription(name, using=using)
        self.write(f"Forgotten: {name}.")


def _as_json(lag: SubscriptionLag) -> dict[str, Any]:
    return {
        **lag.as_json(),
        "reads": lag.reads,
        "partitions": lag.partitions,
        "seconds_behind": round(lag.oldest_seconds, 3),
        "fault": lag.fault,
        "cursors": [each.as_json() for each in lag.cursors],
    }
