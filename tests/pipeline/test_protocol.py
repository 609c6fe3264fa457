"""All readers and writers refuse a table whose protocol another program has raised: the names of
its files no longer say which rows count."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures

from outbox_app.pipeline import read
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.table import Archive

from .harness import commits, tree
from .test_compaction import ARROW, LOG, Batches, offset


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "archive")


def allowed(folder):
    """Deletion vectors are allowed, and there is none."""
    DeltaTable(folder).alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )


def deleted(folder):
    """A deletion vector hides a row of a file, which keeps its name."""
    add = commits(folder)[-1][1]["add"]
    vector = {"storageType": "u", "pathOrInlineDv": "x" * 20, "sizeInBytes": 34, "cardinality": 1}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    _commit(
        folder,
        {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
        {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}},
        {"add": {**add, "deletionVector": {**vector, "offset": 1}}},
    )


def mapped(folder):
    """A column has been renamed, and its name in the files is another."""
    [metadata] = [each["metaData"] for each in commits(folder)[0] if "metaData" in each]
    schema = json.loads(metadata["schemaString"])
    for number, column in enumerate(schema["fields"], 1):
        mapping = {"id": number, "physicalName": column["name"]}
        column["metadata"] = {f"delta.columnMapping.{key}": mapping[key] for key in mapping}
        column["name"] = column["name"].replace("topic", "subject")
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] |= {
        "delta.columnMapping.mode": "name",
        "delta.columnMapping.maxColumnId": str(len(schema["fields"])),
    }
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    _commit(folder, {"protocol": protocol}, {"metaData": metadata})


@pytest.mark.parametrize(
    ("change", "versions"), [(allowed, "3 and 7"), (deleted, "3 and 7"), (mapped, "2 and 5")]
)
def test_a_newer_protocol_is_refused(folder, spark, change, versions):
    batches = Batches(folder)
    batches.add(2, 2)
    files = {file.name for file in batches.archive.files()}
    change(folder)
    before = tree(folder)
    for use in (
        lambda: Archive.load(folder, LOG),
        lambda: Archive.make(folder, LOG, offset(0), ARROW),
        lambda: batches.archive.commit([], offset(3)),
        lambda: read(spark, log=Options(url="sqlite:////nowhere"), archive=folder),
    ):
        with pytest.raises(ArchiveRefused, match="raised the protocol of the archive") as refused:
            use()
        assert f"to {versions}; this release knows 1 and 2" in str(refused.value)
    assert tree(folder) == before
    # The names of files are the same: they do not show what has changed.
    assert set(pa.table(DeltaTable(folder).get_add_actions())["path"].to_pylist()) == files


def _commit(folder, *actions):
    info = {"commitInfo": {"timestamp": 1, "operation": "OTHER", "operationParameters": {}}}
    path = Path(folder, "_delta_log", f"{len(commits(folder)):020d}.json")
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (info, *actions)))
