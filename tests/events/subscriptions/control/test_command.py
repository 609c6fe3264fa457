"""``manage.py outbox_subscriptions``: its output, its effects, and its exit codes."""

from __future__ import annotations

import json

import pytest
from django.core.management import call_command

from outbox_app.events import subscriber
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.models import Lease
from outbox_app.process.lease import LeaseHolder

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_life(alias, published, run, seen_by, command):
    seen = seen_by("shop", partitions=2)
    published(*"abc")
    assert "waiting" in command("list")[1]
    run("shop")
    assert command("pause", "shop") == (0, "Paused shop: it handles no event.\n")
    published("d")
    assert run("shop") == 0
    code, out = command("list")
    assert code == 0
    columns = out.splitlines()[1].split()
    assert columns[:3] == ["shop", "paused", "2"]
    assert columns[4:6] == ["3", "1"]
    assert command("resume", "shop")[0] == 0
    run("shop")
    code, out = command("reset", "shop", "--dry-run")
    assert code == 0
    assert "to the beginning: every event that is kept is handled again" in out
    assert out.endswith("Nothing was done.\n")
    assert run("shop") == 0
    code, out = command("reset", "shop")
    assert (code, out.endswith("Done.\n")) == (0, True)
    assert run("shop") == 4
    assert command("replay", "shop", "--from", "now")[0] == 0
    assert run("shop") == 0
    assert len(seen) == 8


def test_list_as_json(alias, published, run, seen_by, command):
    seen_by("shop")
    Subscription.objects.using(alias).create(name="gone\x1b[31m")
    published("a")
    [shop, gone] = sorted(
        json.loads(command("list", "--json")[1])["subscriptions"], key=lambda s: s["declared"] * -1
    )
    assert (shop["name"], shop["state"], shop["handled"]) == ("shop", "waiting", 0)
    assert (gone["declared"], gone["cursors"]) == (False, [])
    run("shop")
    [found] = json.loads(command("list", "shop", "--json")[1])["subscriptions"]
    assert (found["handled"], found["behind"], found["complete"]) == (1, 0, True)
    assert found["cursors"][0]["log"] == "outbox_event"
    assert "\x1b" not in command("list")[1]
    assert "not declared in the code" in command("list")[1]


def test_list_shows_why_it_stands_still(alias, published, run, command):
    @subscriber("fails")
    def handle(events):
        raise ValueError("\x1b[31m no stock")

    published("a")
    run("fails")
    code, out = command("list")
    assert code == 0
    assert "failing" in out
    assert r"outbox_event[0]: ValueError: \x1b[31m no stock" in out


def test_an_empty_list(alias, command):
    nothing = f"No subscription is declared on {alias!r}, and none has run.\n"
    assert command("list") == (0, nothing)
    assert command("gaps") == (0, "No gap is open.\n")


def test_a_name_that_nobody_knows(alias, seen_by, command):
    seen_by("shop")
    for options in ([], ["--json"]):
        code, out = command("list", "shpo", *options)
        assert code == 2
        assert "'shpo'" in out
    assert command("list", "shop")[0] == 0


def test_several_logs_have_no_position_in_common(alias, published, run, seen_by, command):
    seen_by("all")
    published(*"abc")
    run("all")
    assert command("list", "all")[1].splitlines()[1].split()[3].isdecimal()
    other = Cursor.objects.using(alias).get()
    other.pk, other.log, other.position = None, "other_log", 1
    other.save(using=alias)
    reads = {"logs": ["outbox_event", "other_log"], "topics": None, "types": None}
    Subscription.objects.using(alias).update(reads=reads)  # by the code of other processes
    assert command("list", "all")[1].splitlines()[1].split()[3] == "-"


def test_release(alias, published, run, seen_by, command):
    seen_by("shop")
    published("a", "b")
    run("shop")
    for position, stream in enumerate("ab", 1):
        ParkedStream.objects.using(alias).create(
            subscription="shop", partition=0, log="outbox_event", stream=stream, version=1,
            position=position, error="",
        )  # fmt: skip
    assert command("release", "shop", "--stream", "x") == (1, "Released 0 streams.\n")
    assert command("release", "shop", "--stream", "a") == (0, "Released 1 stream.\n")
    assert command("release", "shop", "--all") == (0, "Released 2 streams.\n")


def test_gaps(alias, command):
    gap = Gap.objects.using(alias).create(
        kind="version", subscription="shop", log="outbox_event", stream="a\x07", first=2, last=3
    )
    ParkedStream.objects.using(alias).create(
        subscription="shop", partition=0, log="outbox_event", stream="a\x07", version=2,
        position=4, error="",
    )  # fmt: skip
    out = command("gaps", "shop")[1]
    assert f"{gap.pk}  " in out
    assert r"shop outbox_event a\x07 2-3" in out
    assert command("gaps", "other")[1] == "No gap is open.\n"
    assert "--reason" in command("skip-gap", str(gap.pk))[1]
    assert "invalid int value: 'x'" in command("skip-gap", "x", "--reason", "lost")[1]
    assert command("skip-gap", str(gap.pk), "--reason", " ")[0] == 1
    assert command("skip-gap", "9" * 19, "--reason", "lost")[0] == 1
    code, out = command("skip-gap", str(gap.pk), "--reason", "lost by the import")
    assert (code, out.startswith("Skipped: ")) == (0, True)
    gap.refresh_from_db()
    assert (gap.state, gap.reason) == ("skipped", "lost by the import")
    assert "outbox_subscriptions" in gap.settled_by
    assert command("skip-gap", str(gap.pk), "--reason", "again")[0] == 1


def test_an_id_with_a_digit_too_many_is_not_that_of_another_gap(alias, command):
    gap = Gap.objects.using(alias).create(
        kind="version", subscription="", log="outbox_event", stream="a", first=2, last=3
    )
    assert command("skip-gap", f"{gap.pk:019}0", "--reason", "lost")[0] == 1
    assert command("skip-gap", f"{gap.pk:019}", "--reason", "lost")[0] == 0


def test_repartition(alias, published, run, seen_by, command):
    seen_by("shop", partitions=3)
    published(*"abcd")
    run("shop")
    seen_by("shop", partitions=2)
    published(*"ab")
    code, out = command("repartition", "shop")
    assert code == 1
    assert "pass over 2 events that it has not handled" in out
    Event.objects.using(alias).filter(version=2).delete()
    assert command("repartition", "shop") == (0, "shop has 2 partitions (before: 3).\n")
    assert command("repartition", "shop") == (0, "shop has 2 partitions (before: 2).\n")


IMPOSSIBLE = [
    (["pause", "nobody"], 2),
    (["reset", "nobody"], 2),
    (["repartition", "nobody"], 2),
    (["replay", "shop", "--from", "yesterday"], 2),
    (["replay", "shop", "--from", ""], 2),
    (["replay", "shop", "--from", "now", "--log", "nowhere"], 2),
    (["replay", "shop", "--from", "77"], 1),
    (["list", "--database", "nowhere"], 2),
    # Wrong arguments are 2 on the command line; call_command gives 1 for them.
    (["pause"], 1),
    (["replay", "shop"], 1),
    (["release", "shop"], 1),
    (["release", "shop", "--all", "--stream", "a"], 1),
    (["bury", "shop"], 1),
]


def test_what_cannot_be_done(alias, seen_by, command):
    seen_by("shop")
    for arguments, code in IMPOSSIBLE:
        assert command(*arguments)[0] == code, arguments
    assert not Cursor.objects.using(alias).exists()


UNKNOWN = [
    ["pause", "shop", "--dry-run"],
    ["pause", "shop", "--log", "outbox_event"],
    ["release", "shop", "--all", "--dry-run"],
    ["release", "shop", "--all", "--log", "outbox_event"],
    ["skip", "shop", "--position", "1", "--reason", "no", "--dry-run"],
    ["discard", "shop", "--stream", "a", "--reason", "no", "--dry-run"],
    ["skip-gap", "1", "--reason", "no", "--dry-run"],
    ["repartition", "shop", "--dry-run"],
    ["forget", "shop", "--dry-run"],
    ["replay", "shop", "--from", "now", "--stream", "a"],
    ["reset", "shop", "--from", "now"],
    ["list", "--restart"],
    ["gaps", "--json"],
    ["release", "shop", "--all", "--reason", "stock is back"],
]


def test_what_an_action_does_not_know_is_refused(alias, published, run, command):
    """A person who asks for a preview, or for one log, is not given all of it in earnest."""
    subscriber("shop", on_error="park")(lambda events: 1 / 0)
    published("a")
    run("shop")
    tables = (Subscription, Cursor, ParkedStream, Gap)
    before = [list(table.objects.using(alias).values()) for table in tables]
    for arguments in UNKNOWN:
        code, out = command(*arguments)
        assert (code, "unrecognized arguments: --" in out) == (1, True), arguments
        assert [list(table.objects.using(alias).values()) for table in tables] == before


ELSEWHERE = [
    ["pause", "shop"],
    ["resume", "shop"],
    ["reset", "shop"],
    ["replay", "shop", "--from", "now", "--dry-run"],
    ["count", "shop"],
    ["repartition", "shop"],
    ["skip", "shop", "--position", "1", "--reason", "no"],
]


def test_one_of_another_database_is_unknown(alias, seen_by, command, settings):
    """``pause`` wrote a row there, and said that it handled no event: it went on where it runs."""

    class Router:
        def db_for_write(self, model, **hints):
            return "elsewhere"

    seen_by("shop")
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": None}
    settings.DATABASE_ROUTERS = [Router()]
    for arguments in ELSEWHERE:
        code, out = command(*arguments, "--database", alias)
        assert (code, f"no subscription 'shop' on {alias!r}" in out) == (2, True)
        assert "'elsewhere'" in out
    assert not Subscription.objects.using(alias).exists()
    assert not Cursor.objects.using(alias).exists()


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        call_command("outbox_subscriptions", "--help")
    out = capsys.readouterr().out
    for word in ("pause", "replay", "--from PLACE", "beginning", "Exit codes", "--dry-run"):
        assert word in out
    with pytest.raises(SystemExit):
        call_command("outbox_subscriptions", "replay", "--help")
    assert "--skip-ahead" in capsys.readouterr().out


def test_forget(alias, published, run, seen_by, command):
    seen_by("kept")
    seen_by("gone")
    published(*"ab")
    run("kept", "gone")
    key = {"subscription": "gone", "log": "outbox_event", "first": 1, "last": 1}
    Gap.objects.using(alias).create(**key, kind="version")
    code, out = command("forget", "gone")
    assert (code, "is still declared" in out) == (1, True)
    declared._subscribers.pop("gone")
    member = LeaseHolder(using=alias, lease_seconds=60, resource="subscription:gone", parts=1)
    member.join()
    code, out = command("forget", "gone")
    assert (code, "A process runs" in out) == (1, True)
    member.leave()
    member.resource = "subscription:kept"
    member.join()
    assert command("forget", "gone") == (0, "Forgotten: gone.\n")
    assert Lease.objects.using(alias).get().resource == "subscription:kept"
    names = [
        set(model.objects.using(alias).values_list(column, flat=True))
        for model, column in ((Subscription, "name"), (Cursor, "subscription"))
    ]
    assert names == [{"kept"}, {"kept"}]
    assert not Gap.objects.using(alias).exists()
    assert command("forget", "gone")[0] == 2
