"""The reference lists all settings, options, columns, indexes, metrics, signals and public names.

The tests look for each in its own section, on the pages of its own app. (Checks have a test of
their own.)
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal

import outbox_app
from outbox_app import (
    celery,
    entities,
    events,
    fleet,
    ids,
    jobs,
    models,
    monitoring,
    pipeline,
    prepared,
    retention,
    sharding,
    testing,
)
from outbox_app import (
    fields as model_fields,
)
from outbox_app.capability import Capability, capabilities
from outbox_app.entities import testing as of_entities
from outbox_app.events import subscriptions
from outbox_app.events import testing as of_events
from outbox_app.metrics import all_metrics
from outbox_app.prepared import testing as of_prepared
from tests.pages import APPS, REFERENCE, ROOMS, app_of, headings, pages, section, text_of
from tests.tables import every_model

#: What is public is exported here, and nowhere below.
PUBLIC = (
    outbox_app,
    celery,
    entities,
    events,
    model_fields,
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
COMMANDS = {name: app for name, app in sorted(get_commands().items()) if app in APPS}
#: Capabilities add to what they do: their pages say so under the same name.
SHARED = {"run_outbox", "outbox_status", "outbox_prune"}
MODELS = sorted(
    (each for each in every_model() if not each._meta.proxy),
    key=lambda m: m.__name__,
)
DOORS = {app.name: app.doors for app in capabilities()}


@pytest.mark.parametrize("app", capabilities()[1:], ids=lambda app: app.label)
def test_a_page_begins_with_the_line_of_its_app(app: Capability) -> None:
    title, line, *_ = (REFERENCE / f"{app.name.rpartition('.')[2]}.md").read_text().split("\n\n")
    assert title.startswith("# ")
    names = ", ".join(f'"{name}"' for name in (*app.needs, app.name))
    assert line == f"Needs: `INSTALLED_APPS += [{names}]`"


def test_pages_of_the_core_speak_of_jobs() -> None:
    words = (
        r"\bentit\w+|\bsubscri\w+|\bprojection|\bprepared\b|\bpeers?\b|\bsnowflake|"
        r"\bthe (?:fleet|door|pipeline)\b|\bSpark\b|\boutbox_app\.(?:events|entities)\b"
    )
    found = {
        page.name: re.findall(words, page.read_text())
        for page in pages("outbox_app")
        if page.name != "index.md"
    }
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("app", ROOMS)
def test_the_index_groups_the_pages_of_an_app(app: str) -> None:
    """Jobs come first."""
    groups = (REFERENCE / "index.md").read_text().split("\n**")[1:]
    names = {page.stem for page in pages(app)} - {"index"}
    [place] = [
        n
        for n, group in enumerate(groups)
        if names <= set(re.findall(r"(\w+(?:-\w+)*)\.md\)", group))
    ]
    assert (place == 0) == (app == "outbox_app")


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


@pytest.mark.parametrize("app", APPS)
def test_settings_have_headings_on_the_pages_of_their_app(app: str) -> None:
    keys = DOORS[app].settings
    named = re.findall(r"^#+ `([A-Z_]+)`$", text_of(app), re.MULTILINE)
    assert sorted(named) == sorted(each.name for each in (fields(keys) if keys else ()))


@pytest.mark.parametrize("app", APPS)
def test_pages_of_an_app_have_its_commands(app: str) -> None:
    found = headings(app) & set(COMMANDS)
    assert found - (SHARED if app != "outbox_app" else set()) == {
        name for name, home in COMMANDS.items() if home == app
    }


def documented_options(app: str, command: str) -> set[str]:
    cells = re.findall(r"^\| (`--[^|]*)", section(app, command), re.MULTILINE)
    return {option for cell in cells for option in re.findall(r"`(--[a-z-]+)", cell)}


@pytest.mark.parametrize("name", set(COMMANDS) - {"outbox_prune"})
def test_every_option_is_documented_and_every_documented_option_exists(name: str) -> None:
    app = COMMANDS[name]
    assert documented_options(app, name) == options(load_command_class(app, name))


@pytest.mark.parametrize("app", APPS)
def test_options_of_outbox_prune_are_documented_by_their_app(app: str) -> None:
    added: dict[str, set[str]] = {}
    for name, doors in DOORS.items():
        more: list[str] = []
        doors.prune_arguments(lambda option, more=more, **kwargs: more.append(option))
        added[name] = {*more, *(f"--{kind}" for kind in doors.kept())}
    if app == "outbox_app":
        every = options(load_command_class(app, "outbox_prune"))
        expected = every - set().union(*(added[name] for name in APPS[1:]))
        assert added[app] <= expected
    else:
        expected = added[app]
    assert documented_options(app, "outbox_prune") == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_is_documented(name: str) -> None:
    app = COMMANDS[name]
    found = set(re.findall(r"^\| `([a-z-]+)` \|", section(app, name), re.MULTILINE))
    assert subcommands(load_command_class(app, name)) <= found


@pytest.mark.parametrize("app", APPS)
def test_exit_codes_of_every_command_are_in_the_table_of_its_app(app: str) -> None:
    heads = "".join(re.findall(r"^\| code \| (.*)", text_of(app), re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", heads)) == sorted(
        name for name, home in COMMANDS.items() if home == app
    )


@pytest.mark.parametrize("app", APPS)
def test_pages_of_an_app_have_its_tables(app: str) -> None:
    named = set(re.findall(r"^#+ `\w+`: `(outbox_\w+)`$", text_of(app), re.MULTILINE))
    assert named == {each._meta.db_table for each in MODELS if app_of(each.__module__) == app}


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_column_and_index_is_documented(model: type) -> None:
    app = app_of(model.__module__)
    text = section(app, f"{model.__name__}`: `{model._meta.db_table}")
    assert text
    if model.__name__ == "DeadJob":  # it says so: as StagedJob
        text += section(app, "StagedJob")
    named = [field.column for field in model._meta.fields if field.column]
    named += [item.name for item in (*model._meta.indexes, *model._meta.constraints)]
    assert [name for name in named if f"`{name}`" not in text] == []


def metrics_of(app: str) -> list[str]:
    """The metrics of the figures of an app's section; those of no section are the core's."""
    sections = {name: doors.empty for name, doors in DOORS.items() if doors.empty}
    named = {
        name: [each.metric for each in section.figures() if each.metric]
        for name, section in sections.items()
    }
    others = {name for metrics in named.values() for name in metrics}
    named["outbox_app"] = [name for name in all_metrics() if name not in others]
    return named.get(app, [])


@pytest.mark.parametrize("app", APPS)
def test_every_metric_is_documented_by_its_app_with_its_labels(app: str) -> None:
    text = text_of(app).partition("\n| metric | labels | meaning |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(outbox_\w+)` \|(.*?)\|", text, re.MULTILINE)
    documented = [(name, tuple(re.findall(r"`(\w+)`", labels))) for name, labels in rows]
    assert documented == [(name, all_metrics()[name].labels) for name in metrics_of(app)]


@pytest.mark.parametrize("app", APPS)
def test_every_problem_is_documented_by_its_app_with_its_severity(app: str) -> None:
    rows = re.findall(r"^\| (bad|warning) \| (.*?) \|", section(app, "outbox_status"), re.MULTILINE)
    documented = {
        code: severity for severity, codes in rows for code in re.findall("`(.*?)`", codes)
    }
    assert documented == {code: kind.severity for code, kind in DOORS[app].kinds.items()}


def module_of(app: str, name: str) -> dict[str, Any]:
    """What is in a module of an app; empty: there is no such module."""
    found = importlib.util.find_spec(f"{app}.{name}")
    return vars(importlib.import_module(found.name)) if found else {}


@pytest.mark.parametrize("app", APPS)
def test_signals_are_documented_by_their_app(app: str) -> None:
    rows = text_of(app).partition("\n| signal | when | arguments |\n")[2].partition("\n\n")[0]
    names = [name for name, value in module_of(app, "signals").items() if isinstance(value, Signal)]
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == names


@pytest.mark.parametrize("app", APPS)
def test_exceptions_are_on_a_page_of_their_app(app: str) -> None:
    found = re.findall(r"^\.\. automodule:: (.*)", text_of(app), re.MULTILINE)
    assert found == ([f"{app}.exceptions"] if module_of(app, "exceptions") else [])


def directives() -> dict[str, list[str]]:
    """The public names that each app's pages describe from their docstrings."""
    directive = (
        r"^\.\. auto(?:function|class|decorator|data|method|exception):: (outbox_app\.[\w.]+)"
    )
    return {app: re.findall(directive, text_of(app), re.MULTILINE) for app in ROOMS}


@pytest.mark.parametrize("app", ROOMS)
def test_a_public_name_is_on_a_page_of_its_app(app: str) -> None:
    assert [name for name in directives()[app] if app_of(name) != app] == []


def test_the_reference_is_about_what_is_exported_and_about_all_of_it() -> None:
    """Under its public name: no page names a module that may move."""
    documented = {name for names in directives().values() for name in names}
    text = "\n".join(map(text_of, ROOMS))
    of_models = (name for name, value in vars(models).items() if not inspect.ismodule(value))
    in_prose = {f"{models.__name__}.{name}" for name in of_models}
    exported = {f"{package.__name__}.{name}" for package in PUBLIC for name in package.__all__}
    exported |= in_prose
    in_prose |= {f"{celery.__name__}.{name}" for name in celery.__all__}
    for name in re.findall(r"^## `(\w+)`", text, re.MULTILINE):
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
    names = set(re.findall(r'get_logger\("(outbox_app\.[a-z._]+)"\)', code))
    assert names
    assert sorted(name for name in names if f"`{name}`" not in text) == []


@pytest.mark.parametrize("app", APPS)
def test_every_exception_has_a_docstring_for_its_page(app: str) -> None:
    module = module_of(app, "exceptions")
    found = [
        value
        for value in module.values()
        if inspect.isclass(value) and value.__module__ == f"{app}.exceptions"
    ]
    assert bool(found) == bool(module)
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
