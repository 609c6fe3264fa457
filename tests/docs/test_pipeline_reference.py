"""The reference of the pipeline lists everything that exists, in order, and nothing else."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields

import pyarrow as pa
import pytest

from outbox_app.pipeline.archiver import MAX_ROWS
from outbox_app.pipeline.defects import KINDS
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.options import Options, _spelled
from outbox_app.pipeline.schema import ANSWERS, SCHEMAS, arrow_types
from outbox_app.pipeline.statistics import COLUMNS, NAMES
from outbox_app.pipeline.table import Mark
from tests.pages import REFERENCE

PAGE = (REFERENCE / "pipeline.md").read_text()
#: Options whose default is no value that the page could repeat.
TOLD = {"url": "must be given", "partitions": "cores of the machine that plans"}
NONE = {"passwordFile", "passwordEnv", "password", "archive"}
PARQUET = {
    pa.int64(): "INT64",
    pa.int32(): "INT32",
    pa.string(): "STRING",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP(MICROS, UTC)",
}


def rows(heading: str, page: str = PAGE) -> list[list[str]]:
    """The cells of the tables below a heading, up to the next one, without the tables' heads."""
    found = re.search(rf"^#+ {heading}$(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading {heading!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {number for n, row in enumerate(cells) if set(row[0]) == {"-"} for number in (n - 1, n)}
    return [row for number, row in enumerate(cells) if number not in heads]


def names(heading: str) -> list[str]:
    """What stands in code in the first cells of the tables below a heading."""
    return [name for row in rows(heading) for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_option_of_the_data_source_is_documented_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1] for row in rows("Data source")}
    expected = {}
    for each in fields(Options):
        name = _spelled(each.name)
        default = each.default
        if name in TOLD or name in NONE:
            assert default in (MISSING, "")
            expected[name] = TOLD.get(name, "none")
        elif default == "":
            expected[name] = documented.get(name) or "in words"
        else:
            text = str(default).lower() if isinstance(default, bool) else f"{default}"
            expected[name] = f"`{text.removesuffix('.0')}`"
    assert documented == expected
    assert list(documented) == list(expected)


def test_seconds_and_rows_are_the_units_of_numbers() -> None:
    units = {row[0].strip("`"): row[2] for row in rows("Data source") if row[2]}
    numbers = {_spelled(each.name) for each in fields(Options) if each.type in ("int", "float")}
    assert set(units) == numbers


def test_columns_of_a_log_are_documented_with_their_types() -> None:
    kinds = dict(column.split() for column in SCHEMAS["events"].split(", "))
    arrow = arrow_types(SCHEMAS["events"])
    expected = [
        [f"`{name}`", f"`{kind}`", f"`{PARQUET[arrow.field(name).type]}`"]
        for name, kind in kinds.items()
    ]
    assert [row[:3] for row in rows("Columns")] == expected


def test_columns_of_versions_are_documented_with_their_types() -> None:
    documented = [f"{row[0]} {row[1]}".replace("`", "") for row in rows("Columns of versions")]
    assert ", ".join(documented) == ANSWERS


@pytest.mark.parametrize("read", ["heads", "inbox"])
def test_columns_of_what_else_can_be_read_are_documented(read: str) -> None:
    assert f"`{SCHEMAS[read]}`" in " ".join(PAGE.split())


def test_keys_of_offsets_and_commits_are_documented() -> None:
    assert names("Offsets") == [each.name for each in fields(Offset)]
    assert names("Commits") == [each.name for each in fields(Mark)]


def test_kinds_of_defects_are_documented_with_their_titles() -> None:
    assert [row[:2] for row in rows("Defects")] == [
        [f"`{name}`", kind.title] for name, kind in KINDS.items()
    ]


def test_statistics_are_documented() -> None:
    listed = names("Statistics")
    assert listed[: len(NAMES)] == list(NAMES)
    assert listed[len(NAMES) :] == list(COLUMNS)


def test_the_size_of_a_batch_is_documented() -> None:
    assert f"{MAX_ROWS:,}" in PAGE
    assert f"| {MAX_ROWS} |" in PAGE
