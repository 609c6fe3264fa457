"""``python docs/from_code.py`` writes into the reference what the code says, too.

These are types of columns, columns of indexes, and the values that options of commands take.
What each means is the page's own. The pages stay plain Markdown, so that they are read without
Sphinx, too.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TYPES = {
    "AutoField": "integer",
    "BigAutoField": "bigint",
    "BigIntegerField": "bigint",
    "BinaryField": "bytes",
    "BooleanField": "boolean",
    "CharField": "varchar({0.max_length})",
    "DateField": "date",
    "DateTimeField": "timestamp",
    "FloatField": "double",
    "IntegerField": "integer",
    "JSONField": "json",
    "PositiveIntegerField": "integer",
    "PositiveSmallIntegerField": "smallint",
    "SmallIntegerField": "smallint",
    "TextField": "text",
    "UUIDField": "uuid",
}
#: The heading of a table, or of a command, and what follows until the next heading.
SECTION = re.compile(r"^(#+ (?:`\w+`: )?`(\w+)`\n)(.*?)(?=^#|\Z)", re.MULTILINE | re.DOTALL)
#: The first two cells of a row about columns or an index.
ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|\n]*?) \|", re.MULTILINE)
#: The first cell of a row about one option.
OPTION = re.compile(r"^\| `(--[a-z-]+)[^`|]*` \|", re.MULTILINE)


def type_of(field: Any) -> str:
    words = [TYPES[field.get_internal_type()].format(field)]
    if field.primary_key:
        words.append("primary key")
    elif field.unique:
        words.append("unique")
    elif field.db_index:
        words.append("indexed")
    if field.null:
        words.append("NULL")
    return ", ".join(words)


def columns_of(model: Any, index: Any) -> str:
    names = [model._meta.get_field(name.lstrip("-")).column for name in index.fields]
    unique = ["unique"] if type(index).__name__ == "UniqueConstraint" else []
    return ", ".join([*(f"`{name}`" for name in names), *unique])


def cells(model: Any) -> dict[str, str]:
    """The second cell of each row, by the name in the first."""
    found = {field.column: type_of(field) for field in model._meta.fields if field.column}
    for index in (*model._meta.indexes, *model._meta.constraints):
        if getattr(index, "fields", ()):
            found[index.name] = columns_of(model, index)
    return found


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def options_of(command: Any) -> dict[str, str]:
    """The options of a command, of all its actions: with the name of their value."""
    found: dict[str, str] = {}
    for parser in parsers_of(command.create_parser("manage.py", "")):
        for action in parser._actions:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            found |= {name: name + value for name in action.option_strings}
    return found


def written(text: str, models: Iterable[Any], commands: Mapping[str, Any]) -> str:
    """A page, with the cells that the code decides."""
    known = {model._meta.db_table: cells(model) for model in models}
    options = {name: options_of(command) for name, command in commands.items()}

    def section(found: re.Match[str]) -> str:
        head, name, body = found.groups()
        of_table, of_command = known.get(name, {}), options.get(name, {})

        def row(each: re.Match[str]) -> str:
            names = re.findall(r"\w+", each[1])
            if not of_table.keys() >= set(names):
                return each[0]
            return f"| {each[1]} | {', '.join(dict.fromkeys(of_table[n] for n in names))} |"

        def option(each: re.Match[str]) -> str:
            return f"| `{of_command.get(each[1]) or each[0][3:-3]}` |"

        return head + OPTION.sub(option, ROW.sub(row, body))

    return SECTION.sub(section, text)


def main() -> None:
    import django
    from django.apps import apps
    from django.core.management import get_commands, load_command_class

    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    models = [each for each in apps.get_models() if each.__module__.startswith("outbox_app.")]
    commands = {
        name: load_command_class(app, name)
        for name, app in get_commands().items()
        if app.startswith("outbox_app")
    }
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        page.write_text(written(page.read_text(), models, commands))


if __name__ == "__main__":
    main()
