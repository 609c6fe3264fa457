"""Entities in the admin: permissions, escaping, and the differences between two states."""

from __future__ import annotations

import json
import sys
from html import escape
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox_app.admin.payload import difference_of
from outbox_app.entities import Command
from outbox_app.entities.admin import EntityAdmin, VersionAdmin
from outbox_app.entities.maintenance import erase
from tests import forking
from tests.entities.models import Account, AccountVersion, Stock

from ..admin.pages import body, text
from ..admin.test_display import CODES, SCRIPT, VISIBLE

pytestmark = pytest.mark.django_db(transaction=True)

ENTITIES = reverse("admin:entities_account_changelist")
VERSIONS = reverse("admin:entities_accountversion_changelist")
SECRET = "hunter-2"


def entity(id="a"):
    return reverse("admin:entities_account_change", args=[quote(id)])


def link(address):
    """How the address is written in HTML."""
    return f'href="{escape(address)}'


@pytest.fixture
def ask(alias):
    """``ask("a", "withdraw", {"amount": 4})``: a command with a new id."""
    numbers = iter(range(100))

    def execute(id, command, arguments=None, **options):
        options.setdefault("command_id", f"c{next(numbers)}")
        return Account.execute(id, command, arguments, using=alias, **options)

    return execute


@pytest.fixture
def account(ask):
    """Account a at version 3. The last version is a rejection."""
    ask("a", "open", {"owner": {"name": "ann", "password": SECRET}, "balance": 10})
    ask("a", "withdraw", {"amount": 4})
    ask("a", "withdraw", {"amount": 99})


@pytest.fixture
def version(alias):
    """``version(2)``: the URL of a version of account a."""

    def address(number, id="a"):
        row = Account.history(id, using=alias).get(version=number)
        return reverse("admin:entities_accountversion_change", args=[row.pk])

    return address


def staff(*names):
    user = User.objects.create_user("staff", is_staff=True)
    rights = Permission.objects.filter(codename__in=names)
    assert len(rights) == len(names)
    user.user_permissions.set(rights)
    client = Client()
    client.force_login(user)
    return client


def test_entities_lead_to_their_versions_and_answers(account, superuser, version):
    assert f'href="{entity()}"' in body(superuser.get(ENTITIES))
    page = superuser.get(entity())
    shown = text(page)
    assert '"balance": 6' in shown
    assert f'href="{VERSIONS}?stream=a"' in body(page)
    shown = text(superuser.get(VERSIONS, {"stream": "a"}))
    assert [word for word in shown.split() if word in ("accepted", "rejected")] == [
        "rejected", "accepted", "accepted",
    ]  # fmt: skip
    shown = text(superuser.get(version(3)))
    assert "account.withdrawn.rejected" in shown
    assert "There is not enough on the account." in shown
    assert '"amount": 99' in shown
    assert "No difference." in shown


def test_two_states_are_compared(account, superuser, version):
    page = superuser.get(version(2))
    shown = text(page)
    assert "Compared with version 1." in shown
    assert '- "balance": 10, + "balance": 6,' in shown
    assert "Compared" not in text(superuser.get(version(1)))


def test_a_state_is_compared_with_the_last_one_before_it(alias, superuser):
    """Of the versions of a transaction only the last one has a state."""
    fill = Command("a", "fill", {"pieces": 9}, command_id="fill")
    Stock.execute_many([fill, *(_sell(n) for n in range(2))], using=alias)
    Stock.execute_many([_sell(n) for n in range(2, 4)], using=alias)
    rows = Stock.history("a", using=alias)
    address = "admin:entities_stockversion_change"
    pages = {row.version: text(superuser.get(reverse(address, args=[row.pk]))) for row in rows}
    assert "Compared with version 3." in pages[5]
    assert '- "left": 7 + "left": 5' in pages[5]
    assert [number for number, page in pages.items() if "Compared" in page] == [5]


def _sell(number):
    return Command("a", "sell", {"pieces": 1}, command_id=f"sell-{number}")


def test_a_difference_is_masked_and_in_the_order_of_keys():
    before, after = {"b": 1, "a": 2, "token": SECRET}, {"a": 2, "token": "new", "b": 3}
    shown = difference_of(before, after).text
    assert [line for line in shown.split("\n") if line[0] in "+-"] == ['-  "b": 1,', '+  "b": 3,']
    unseen = "They differ in values masked or not shown."
    assert difference_of({"token": SECRET}, {"token": "new"}).note == unseen
    assert difference_of(["x" * 20_000, 1], ["x" * 20_000, 2]).note == unseen
    assert difference_of(None, None).note == "No difference."
    assert "+1" in difference_of("x\n" * 20_000, 1).text


def test_an_erased_entity_has_versions_only(alias, account, superuser, version):
    erase(Account, "a", reason="ticket 88", using=alias)
    assert superuser.get(entity()).status_code == 302
    shown = text(superuser.get(version(1)))
    assert "ticket 88" in shown
    assert "ann" not in shown
    assert '- "balance"' not in text(superuser.get(version(4)))


def test_what_they_carry_takes_a_permission(account, version):
    client = staff("view_account", "view_accountversion")
    for address, times in ((entity(), 1), (version(1), 4), (version(2), 5)):
        shown = text(client.get(address))
        assert (
            shown.count("Hidden: this needs the permission outbox_events.view_payload_event.")
            == times
        )
        assert "ann" not in shown
        assert "balance" not in shown.replace("account.balance", "")
    for address in (ENTITIES, VERSIONS):
        assert "ann" not in text(client.get(address))


def test_secrets_are_masked_for_everybody(account, superuser, version):
    for address in (entity(), version(1), version(2), version(3)):
        shown = text(superuser.get(address))
        assert SECRET not in shown
        assert "ann" in shown or address == version(3)


def test_pages_are_seen_by_those_who_may_view(account, version):
    client = staff("view_account")
    expected = {ENTITIES: 200, entity(): 200, VERSIONS: 403, version(1): 403}
    assert {address: client.get(address).status_code for address in expected} == expected


def test_nothing_is_edited_by_anybody(alias, account, superuser, version):
    before = list(Account.history("a", using=alias).values())
    for address in (entity(), version(1)):
        for page in ("change", "delete"):
            form = {"state": "{}", "version": 7, "post": "yes", "_save": "1"}
            assert superuser.post(address.replace("change", page), form).status_code == 403
    for address in (ENTITIES, VERSIONS):
        assert superuser.get(f"{address}add/").status_code == 403
        form = {"action": "delete_selected", "_selected_action": "a"}
        assert superuser.post(address, form).status_code in (200, 302, 403)
    assert list(Account.history("a", using=alias).values()) == before
    assert Account.objects.using(alias).get().version == 3


@pytest.mark.parametrize("id", [SCRIPT, CODES, "a/b?c=d&e#f", "_2F", " "])
def test_any_id_is_shown_harmlessly_and_found(alias, ask, superuser, version, id):
    ask(id, "open", {"owner": SCRIPT + CODES}, command_id=id)
    assert link(entity(id)) in body(superuser.get(ENTITIES))
    if id.strip():
        assert link(entity(id)) in body(superuser.get(ENTITIES, {"q": id}))
    stream = urlencode({"stream": id})
    for address in (entity(id), version(1, id), f"{VERSIONS}?{stream}"):
        page = superuser.get(address)
        assert SCRIPT not in body(page)
        shown = text(page)  # a hidden field holds what was asked for
        assert not set(CODES.replace("[31mred", "").replace("gnp.exe", "")) & set(shown)
        assert id != CODES or VISIBLE in shown
    assert link(f"{VERSIONS}?{stream}") in body(superuser.get(entity(id)))


def test_a_list_reads_no_states_and_few_rows(alias, account, superuser):
    for address in (ENTITIES, VERSIONS):
        with CaptureQueriesContext(connections[alias]) as queries:
            superuser.get(address)
        for each in queries.captured_queries:
            assert "state" not in each["sql"].replace("outbox_", ""), each["sql"]


def test_types_of_the_project_have_pages():
    assert isinstance(admin.site.get_model_admin(Account), EntityAdmin)
    assert isinstance(admin.site.get_model_admin(AccountVersion), VersionAdmin)


@pytest.mark.system
@pytest.mark.parametrize("first", ["outbox_app", "django.contrib.admin", "bank"])
def test_a_type_that_the_project_has_registered_is_left_alone(tmp_path, first):
    """In any order of INSTALLED_APPS, also where its module of the admin imports ours."""
    bank = tmp_path / "bank"
    bank.mkdir()
    (bank / "__init__.py").touch()
    (bank / "models.py").write_text(
        "from outbox_app.entities import Entity, EntityVersion\n"
        "class SeatVersion(EntityVersion):\n"
        "    class Meta(EntityVersion.Meta):\n        abstract = False\n"
        "class Seat(Entity):\n    versions = SeatVersion\n"
    )
    (bank / "admin.py").write_text(
        "from django.contrib import admin\n"
        "from outbox_app.entities.admin import EntityAdmin\n"
        "from .models import Seat\n"
        "@admin.register(Seat)\n"
        "class SeatAdmin(EntityAdmin):\n    list_display = ['id']\n"
    )
    (tmp_path / "project.py").write_text(
        "from tests.settings import *\n"
        f"apps = {{'outbox_app', 'django.contrib.admin', 'bank'}} - {{{first!r}}}\n"
        "ours = ('django.', 'outbox_app.')\n"
        "rest = [app for app in INSTALLED_APPS if app.startswith(ours) and app not in apps]\n"
        f"INSTALLED_APPS = [{first!r}, *(app for app in rest if app != {first!r}), *sorted(apps)]\n"
    )
    code = (
        "import django; django.setup()\n"
        "import json\n"
        "from django.contrib import admin\n"
        "names = {m.__name__: type(a).__name__ for m, a in admin.site._registry.items()}\n"
        "print(json.dumps([names['Seat'], names['SeatVersion']]))"
    )
    path = f"{tmp_path}:{':'.join(sys.path)}"
    done = forking.run(
        [sys.executable, "-c", code],
        env={"DJANGO_SETTINGS_MODULE": "project", "PYTHONPATH": path, "PATH": ""},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["SeatAdmin", "VersionAdmin"]
