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
difference; 2 wrong arguments, no such subscription or log, a log that cannot be read, or no tables.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from ....aliases import model_alias
from ....exceptions import InvalidArgument, OutboxError
from ....management.base import OutboxCommand, when
from ....models.counting import LISTED
from ....process.preflight import require_migrated
from ....text import one_line
from ...models import Event, Gap, Subscription
from ...subscriptions import control, counting
from ...subscriptions.lag import SubscriptionLag, in_flight, lags
from ...subscriptions.skips import discard_stream, skip_event, skip_gap
from ...subscriptions.start_point import parse_start_point

EXIT_REFUSED = 1


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
        named = "pause resume replay reset release skip discard count repartition forget"
        every = f"list gaps skip-gap {named}"
        parsers = {name: actions.add_parser(name) for name in every.split()}

        def add(actions: str, *names: str, **options: Any) -> None:
            for each in actions.split():
                parsers[each].add_argument(*names, **options)

        add(named, "name", metavar="NAME", help="the subscription")
        add("list gaps", "name", nargs="?", metavar="NAME", help="only this subscription")
        add("skip-gap", "gap_id", type=int, metavar="ID", help="id of a gap, as gaps shows it")
        place = "where to replay from"
        add("replay", "--from", dest="place", required=True, metavar="PLACE", help=place)
        parsers["reset"].set_defaults(place="beginning", reason="")
        add("replay reset skip discard", "--log", help="in this log only (default: all)")
        ahead = "pass over events that were not handled; asks first, and records a gap"
        add("replay reset", "--skip-ahead", action="store_true", help=ahead)
        for each in ("replay", "reset"):
            self.add_no_input(parsers[each])
        dry = "print the moves, and change nothing"
        add("replay reset", "--dry-run", action="store_true", help=dry)
        streams = parsers["release"].add_mutually_exclusive_group(required=True)
        streams.add_argument("--stream", metavar="S", help="release this stream")
        streams.add_argument("--all", action="store_true", help="release all parked streams")
        position = "position of the event to skip"
        add("skip", "--position", type=int, required=True, metavar="N", help=position)
        add("discard", "--stream", required=True, metavar="S", help="discard this stream")
        why = {"metavar": "TEXT", "help": "why something is skipped; kept with it"}
        add("skip discard skip-gap", "--reason", required=True, **why)
        add("replay", "--reason", default="", **why)
        add("count", "--restart", action="store_true", help="the next count begins with this one")
        add("list count", "--json", action="store_true", help="as JSON")
        alias = "alias of the logs (default: the subscription's, or that of Event)"
        add(every, "--database", metavar="ALIAS", help=alias)

    def handle(self, *, action: str, database: str | None, **options: Any) -> None:
        name = options.get("name")
        using = database or (control.alias_of(name) if name else model_alias(Event))
        require_migrated(using, Subscription)
        getattr(self, f"_{action.replace('-', '_')}")(using=using, **options)

    def _list(self, *, name: str | None, using: str, json: bool, **_: Any) -> None:
        found = lags(using=using, names=[name] if name else None)
        if name and not found:
            raise InvalidArgument(
                f"No subscription {name!r} is declared on {using!r}, and none has run."
            )
        flight = in_flight(using=using)
        if json:
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
            f"{'name':<24} {'state':<10} {'parts':>5} {'position':>10} {'handled':>10} "
            f"{'behind':>9} {'late':>8} {'parked':>6} {'gaps':>5}"
        )
        for lag in found:
            logs = len({each.cursor.log for each in lag.cursors})
            position = lag.position if logs < 2 else "-"  # each log has positions of its own
            self.write(
                f"{one_line(lag.name, 80):<24} {lag.state:<10} {lag.partitions:>5} "
                f"{position:>10} {lag.handled:>10} {lag.shown:>9} {lag.oldest_seconds:>7.0f}s "
                f"{lag.parked:>6} {lag.gaps:>5}"
            )
            if lag.state == "undeclared":
                self.write("  not declared in the code, and no process runs it: see forget")
            elif not lag.declared:
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

    def _pause(self, *, name: str, using: str, **options: Any) -> None:
        control.pause(name, using=using)
        self.write(f"Paused {name}: it handles no event.")

    def _resume(self, *, name: str, using: str, **options: Any) -> None:
        control.resume(name, using=using)
        self.write(f"Resumed {name}.")

    def _replay(self, *, name: str, place: str, using: str, **options: Any) -> None:
        try:
            where = parse_start_point(place)
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
        arguments = {key: options[key] for key in ("log", "skip_ahead", "reason")}
        control.replay(name, where, by=self.user, using=using, **arguments)
        self.write("Done.")

    _reset = _replay

    def _release(self, *, name: str, using: str, **options: Any) -> None:
        streams = None if options["all"] else [options["stream"]]
        count = control.release(name, streams, using=using)
        self.write(f"Released {count} {'stream' if count == 1 else 'streams'}.")
        if not count:
            raise SystemExit(EXIT_REFUSED)

    def _skip(self, *, name: str, using: str, position: int, **options: Any) -> None:
        arguments = {key: options[key] for key in ("reason", "log")}
        skip_event(name, position, by=self.user, using=using, **arguments)
        self.write(f"{name} skips position {position}.")

    def _discard(self, *, name: str, using: str, stream: str, **options: Any) -> None:
        arguments = {key: options[key] for key in ("reason", "log")}
        gap = discard_stream(name, stream, by=self.user, using=using, **arguments)
        self.write(f"{name} skips {one_line(gap, 300)}.")

    def _count(self, *, name: str, using: str, restart: bool, json: bool, **options: Any) -> None:
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

    def _gaps(self, *, name: str | None, using: str, **options: Any) -> None:
        gaps = Gap.objects.using(using).open().order_by("seen_at", "id")
        found = list((gaps.filter(subscription=name) if name else gaps)[: LISTED + 1])
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

    def _skip_gap(self, *, gap_id: int, reason: str, using: str, **options: Any) -> None:
        gap = skip_gap(gap_id, by=self.user, reason=reason, using=using)
        self.write(f"Skipped: {one_line(gap, 300)}")

    def _repartition(self, *, name: str, using: str, **options: Any) -> None:
        before, after = control.repartition(name, using=using)
        noun = "partition" if after == 1 else "partitions"
        self.write(f"{name} has {after} {noun} (before: {before}).")

    def _forget(self, *, name: str, using: str, **options: Any) -> None:
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
