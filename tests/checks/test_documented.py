"""Each id is on the page of its app, each id of the page exists, and no message names a page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from django.core.checks import Tags, run_checks

from outbox_app.checks.messages import LISTED, guarded, listed
from outbox_app.checks.values import check_settings
from outbox_app.fleet.checks import check_fleet
from tests.pages import ROOMS, text_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"
ID = re.compile(r"outbox\.[EW]\d{3}")


def ids_in_the_code(app):
    """The ids in the modules of an app. Those of the core are in no folder of a capability."""
    others = [name for name in ROOMS if name.startswith(f"{app}.")]
    found = set()
    for path in (ROOT / app.replace(".", "/")).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if not module.startswith(tuple(f"{name}." for name in others)):
            found |= set(re.findall(r'"(outbox\.[EW]\d+)"', path.read_text()))
    return found


@pytest.mark.parametrize("app", ROOMS)
def test_ids_are_documented_by_their_app(app):
    used = ids_in_the_code(app)
    documented = re.findall(r"^\| `(outbox\..*?)` \|", text_of(app), flags=re.MULTILINE)
    assert used or app != "outbox_app"
    assert all(ID.fullmatch(id) for id in used)
    assert sorted(used) == sorted(documented)


def test_no_message_names_a_page():
    """The wheel has none: a message says by itself what to do."""
    spoken = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if "docs/" not in path.read_text():
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docs = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, spoken)}
        if path.parent.name == "commands":  # the docstring of a command is its help
            docs = set()
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
        pages = [each for each in texts if isinstance(each, str) and re.search(r"docs/\w", each)]
        if wrong := [each for each in pages if each not in docs]:
            found[path.name] = wrong
    assert found == {}


def test_every_check_is_registered_and_guarded(settings):
    settings.OUTBOX = {"BATCH_SIZE": 0}
    [message] = [m for m in run_checks(tags=["outbox"], databases=[]) if m.id == "outbox.E003"]
    assert message.hint
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
        guarded(lambda **kwargs: [1 / 0])()


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
    found = [*guarded(check_fleet)(), *guarded(check_settings)()]
    assert [each.id for each in found] == ["outbox.E046", "outbox.E046", "outbox.E003"]
    assert all("**@" in each.msg and "cret" not in each.msg for each in found)
