"""Each id is on the page of the checks, each id of the page exists, and each hint has a link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.checks import Tags, Warning, run_checks

from outbox_app.checks.messages import LISTED, checks_page, linked, listed
from outbox_app.checks.values import check_settings
from outbox_app.fleet.checks import check_fleet

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"outbox\.[EW]\d{3}")


def ids_in_the_code():
    texts = [path.read_text() for path in (ROOT / "outbox_app").rglob("*.py")]
    return {id for text in texts for id in re.findall(r'"(outbox\.[EW]\d+)"', text)}


def test_ids_are_documented():
    used = ids_in_the_code()
    page = (ROOT / "docs" / "reference" / "checks.md").read_text()
    documented = re.findall(r"^\| `(outbox\..*?)` \|", page, flags=re.MULTILINE)
    assert used
    assert all(ID.fullmatch(id) for id in used)
    assert sorted(used) == sorted(documented)


def test_a_hint_ends_with_the_page_of_all_checks():
    def check(**kwargs):
        yield Warning("one", hint="Do it.", id="outbox.W022")

    [message] = linked(check)()
    assert message.hint == "Do it.\n\tSee docs/reference/checks.md."
    assert (ROOT / checks_page()).is_file()


def test_every_check_is_registered_with_links(settings):
    settings.OUTBOX = {"BATCH_SIZE": 0}
    [message] = [m for m in run_checks(tags=["outbox"], databases=[]) if m.id == "outbox.E003"]
    assert message.hint.endswith("See docs/reference/checks.md.")
    assert not [m for m in run_checks(tags=[Tags.database], databases=[]) if m.id == "outbox.E003"]


@pytest.mark.parametrize(
    ("outbox", "id"),
    [
        (["DATABASE"], "E001"),
        ({"DATABSE": "default"}, "E001"),
        ({"DATABASE": "nowhere"}, "E002"),
        ({"DATABASE": ["default"]}, "E002"),
        ({"INBOX_DATABASE": "nowhere"}, "E002"),
        ({"FLEET": ["shop"]}, "E003"),
        ({"PEERS": ["shop"]}, "E003"),
        ({"TASK_MODES": [1]}, "E003"),
        ({"HOLD_HORIZON": "300"}, "E003"),
        ({"WINDOWS": 1}, "E003"),
        ({"SETTLE_SECONDS": "1"}, "E003"),
    ],
    ids=repr,
)
@pytest.mark.django_db
def test_what_is_wrong_with_the_settings_is_said(settings, outbox, id, alias, make_app):
    """The other checks, which read the settings, do not end the command with an exception."""
    make_app(broker_url="redis://localhost:1").conf.task_time_limit = 9999
    settings.OUTBOX = outbox
    found = run_checks(tags=["outbox"], databases=[alias], include_deployment_checks=True)
    assert [m.id for m in found if m.id[7:] in ("E001", "E002", "E003")] == [f"outbox.{id}"]


def test_what_goes_wrong_with_right_settings_is_raised():
    with pytest.raises(ZeroDivisionError):
        linked(lambda **kwargs: [1 / 0])()


def test_long_lists_are_cut():
    names = [f"n{i}" for i in range(LISTED + 2)]
    assert listed(names) == "n0, n1, n2, n3, n4 and 2 more"
    assert listed(names[:2]) == "n0, n1"


def test_no_message_has_a_password(settings):
    """Of an address in the settings: the messages are in the log of a deploy, or of CI."""
    address = "https://ops:s3cret@shop.example/outbox/"
    settings.OUTBOX = {
        "FLEET": {"SERVICE": "shop", "ADDRESS": address, "SERVERS": {"shop": [address]}},
        "SINK": {"outbox_event": ("s3://key:s3/cret@bucket/events", 0)},
    }
    found = [*linked(check_fleet)(), *linked(check_settings)()]
    assert [each.id for each in found] == ["outbox.E046", "outbox.E046", "outbox.E003"]
    assert all("**@" in each.msg and "cret" not in each.msg for each in found)
