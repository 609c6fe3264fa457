"""The reference lists all options, columns, indexes, signals and public names.

The tests look for each in its own section. (Settings and checks have separate tests.)
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal

import outbox_app
from outbox_app import (
    celery,
    entities,
    events,
    exceptions,
    fields,
    fleet,
    ids,
    jobs,
    models,
    monitoring,
    pipeline,
    prepared,
    retention,
    sharding,
    signals,
    testing,
)
from outbox_app.entities import testing as of_entities
from outbox_app.events import log, subscriptions
from outbox_app.events import testing as of_events
from outbox_app.prepared import testing as of_prepared
from tests.tables import every_model

#: What is public is exported here, and nowhere below.
PUBLIC = (
    outbox_app,
    celery,
    entities,
    log,
    events,
    fields,
    fleet,
    ids,
    jobs,
    monitoring,
    pipeline,
    prepared,
    retention,
    subscriptions,
    sharding,
    testing,
    of_entities,
    of_events,
    of_prepared,
)
REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMANDS = sorted(name for name, app in get_commands().items() if app.startswith("outbox_app"))
MODELS = sorted(
    (each for each in every_model() if not each._meta.proxy),
    key=lambda m: m.__name__,
)


def section(page: str, heading: str) -> str:
    """The text below a heading of the second level that begins so."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^## `{heading}`.*?(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section on {heading}"
    return found[0]


def options(command: BaseCommand) -> set[str]:
    """The options that the command and its subcommands add to Django's own."""
    django = BaseCommand().create_parser("", "")._option_string_actions
    found: set[str] = set()
    parsers = [command.create_parser("", "")]
    while parsers:
        parser = parsers.pop()
        found |= set(parser._option_string_actions)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return {option for option in found - set(django) if option.startswith("--")}


def subcommands(command: BaseCommand) -> set[str]:
    """The names that come first on the command's line, where it has several parsers."""
    actions = command.create_parser("", "")._actions
    found = [each for each in actions if isinstance(each, argparse._SubParsersAction)]
    return {name for action in found for name in action.choices}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented_and_every_documented_option_exists(name: str) -> None:
    cells = re.findall(r"^\| (`--[^|]*)", section("commands.md", name), re.MULTILINE)
    documented = {option for cell in cells for option in re.findall(r"`(--[a-z-]+)", cell)}
    assert documented == options(load_command_class(get_commands()[name], name))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_is_documented(name: str) -> None:
    text = section("commands.md", name)
    found = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert subcommands(load_command_class(get_commands()[name], name)) <= found


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_codes_of_every_command_are_in_the_table(name: str) -> None:
    table = (REFERENCE / "commands.md").read_text().partition("## Exit codes")[2]
    assert f"`{name}`" in table.partition("\n## ")[0]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_column_and_index_is_documented(model: type) -> None:
    text = section("models.md", model.__name__)
    assert model._meta.db_table in text
    if model.__name__ == "DeadJob":  # it says so: as StagedJob
        text += section("models.md", "StagedJob")
    named = [field.column for field in model._meta.fields if field.column]
    named += [item.name for item in (*model._meta.indexes, *model._meta.constraints)]
    assert [name for name in named if f"`{name}`" not in text] == []


def test_every_signal_is_documented() -> None:
    text = (REFERENCE / "signals.md").read_text()
    names = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_the_reference_is_about_what_is_exported_and_about_all_of_it() -> None:
    """Under its public name: no page names a module that may move."""
    directive = (
        r"^\.\. auto(?:function|class|decorator|data|method|exception):: (outbox_app\.[\w.]+)"
    )
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    documented = set(re.findall(directive, pages, re.MULTILINE))
    of_models = (name for name, value in vars(models).items() if not inspect.ismodule(value))
    in_prose = {f"{models.__name__}.{name}" for name in of_models}
    exported = {f"{package.__name__}.{name}" for package in PUBLIC for name in package.__all__}
    exported |= in_prose
    in_prose |= {f"{celery.__name__}.{name}" for name in celery.__all__}
    for name in re.findall(r"^## `(\w+)`", pages, re.MULTILINE):
        in_prose |= {f"outbox_app.{name}", f"{testing.__name__}.{name}"}
    assert exported - documented - in_prose == set()
    methods = {name for name in documented if name.rpartition(".")[0] in exported}
    modules = ("outbox_app.exceptions.", "outbox_app.metrics.", "outbox_app.views.")
    others = {name for name in documented if not name.startswith(modules)}
    assert others - exported - methods == set()


def test_every_logger_is_documented() -> None:
    root = REFERENCE.parents[1]
    sources = (root / "outbox_app").rglob("*.py")
    code = "\n".join(file.read_text() for file in sources)
    text = (root / "docs/howto/deploy.md").read_text().partition("\n## Logs\n")[2]
    names = set(re.findall(r'get_logger\("(outbox_app\.[a-z]+)"\)', code))
    assert names
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_every_exception_has_a_docstring_for_its_page() -> None:
    found = [
        value
        for value in vars(exceptions).values()
        if inspect.isclass(value) and value.__module__ == exceptions.__name__
    ]
    assert found
    assert [value.__name__ for value in found if not inspect.getdoc(value)] == []


def test_files_of_the_package_that_pages_name_exist() -> None:
    root = REFERENCE.parents[1]
    pages = [*(root / "docs/explanation").glob("*.md"), root / "docs/howto/work-on-outbox_app.md"]
    missing = [
        f"{page.name}: {name}"
        for page in pages
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page.read_text())
        if not ((root / name).exists() or (root / "outbox_app" / name).exists())
    ]
    assert missing == []
