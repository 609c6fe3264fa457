"""The log of an entity type on Spark: all its columns, its audit, and its projections."""

from __future__ import annotations

import json
import pickle
from io import StringIO

import pyarrow as pa
import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.models import QuerySet

from outbox_app.entities.maintenance import erase
from outbox_app.events.projections.rebuild import rebuild
from outbox_app.pipeline import folding
from outbox_app.pipeline.driver.pipeline import Pipeline, log_options
from outbox_app.pipeline.driver.rebuild import rebuild_on_spark
from outbox_app.pipeline.driver.run import run_audit
from outbox_app.pipeline.exceptions import InvalidSchema
from outbox_app.pipeline.schema import COLUMNS, SCHEMA
from outbox_app.pipeline.source import OutboxDataSource
from tests.entities.models import Account, AccountVersion
from tests.entities.projected import StateOf
from tests.events.log.own_log.models import Ledger
from tests.events.projections.declared import declare
from tests.events.projections.models import Status
from tests.faults.tools import on
from tests.splitting import split

from .harness import archive, source
from .local_context import LocalContext
from .test_source import struct

pytestmark = pytest.mark.django_db(transaction=True)

ANSWERS = ("command_id", "command", "request_hash", "rejected", "response", "state")


@pytest.fixture
def accounts(alias):
    """Two accounts; one of five versions is a rejection, and one entity was never created."""
    for n, (id, command, arguments) in enumerate(
        [
            ("a", "open", {"owner": "äñ' %s", "balance": 5}),
            ("b", "open", {"owner": "bob"}),
            ("a", "withdraw", {"amount": 3}),
            ("a", "withdraw", {"amount": 3}),
            ("c", "refuse_to_open", {}),
        ]
    ):
        Account.execute(id, command, arguments, command_id=f"c{n}", using=alias)


def read(options, schema=None):
    source = OutboxDataSource(options)
    reader = source.reader(struct(schema or source.schema()))
    away = pickle.loads(pickle.dumps(reader))
    batches = [batch for part in reader.partitions() for batch in away.read(part)]
    return pa.Table.from_batches(batches, schema=reader.schema).to_pylist()


def test_the_columns_of_versions_are_there(alias, accounts, source_options):
    found = sorted(read(source_options(alias, model=AccountVersion)), key=lambda row: row["id"])
    names = (*COLUMNS, *ANSWERS)
    assert [tuple(row) for row in found] == [names] * 5
    for row, version in zip(found, AccountVersion.objects.using(alias).order_by("pk"), strict=True):
        for name in ("data", "response", "state"):
            value = row[name] and json.loads(row[name])
            assert value == getattr(version, name)
        for name in ("id", "stream", "command_id", "command", "request_hash", "rejected"):
            assert row[name] == getattr(version, name)
    assert [row["rejected"] for row in found] == [False, False, False, True, True]
    assert found[4]["state"] is None
    some = read(source_options(alias, model=AccountVersion), "rejected boolean, stream string")
    assert some[3] == {"rejected": True, "stream": "a"}


@pytest.mark.timeout(300)
@on("postgres")
def test_a_session_reads_versions(alias, accounts, spark, source_options):
    frame = spark.read.format("outbox").options(**source_options(alias, model=AccountVersion))
    refused = frame.load().where("rejected").orderBy("id").select("command_id", "state")
    states = [row["state"] and json.loads(row["state"]) for row in refused.collect()]
    assert states == [{"owner": "äñ' %s", "balance": 2}, None]
    some = frame.schema("rejected boolean, command string").load()
    assert some.groupBy("command").count().where("command = 'open'").first()["count"] == 2


def test_other_logs_have_their_own(alias, source_options):
    own = "note string, currency string, booking string, remark string, booked_at timestamp_ltz"
    options = source_options(alias), source_options(alias, model=Ledger)
    common = SCHEMA.replace("timestamp", "timestamp_ltz")
    for each, schema in zip(options, (common, f"{common}, {own}"), strict=True):
        assert OutboxDataSource(each).schema() == schema
        with pytest.raises(InvalidSchema, match="no column 'state' in events"):
            OutboxDataSource(each).reader(struct("state string"))


@pytest.mark.slow
def test_an_archive_has_the_answers(alias, accounts, source_options, tmp_path):
    archive(alias, tmp_path, log=AccountVersion)
    options = source_options(alias, model=AccountVersion)
    there = sorted(read(options), key=lambda row: row["id"])
    AccountVersion.objects.using(alias).filter(pk__lte=there[2]["id"])._raw_delete(alias)
    found = read({**options, "archive": str(tmp_path)})
    assert sorted(found, key=lambda row: row["id"]) == there


def test_a_projection_is_rebuilt_from_archived_versions(alias, accounts, tmp_path, monkeypatch):
    archive(alias, tmp_path, log=AccountVersion)
    declare(StateOf, "states")
    rebuilt(alias)
    rows = Status.objects.using(alias).order_by("pk")
    by_log = list(rows.values())
    assert len(by_log) == 3
    AccountVersion.objects.using(alias).filter(stream="a")._raw_delete(alias)
    rows.delete()
    # It asks Spark, which ``LocalContext`` is not.
    monkeypatch.setattr(folding, "beginning_missing", lambda *_: None)
    rebuilt(alias, archive=str(tmp_path))
    assert list(rows.values()) == by_log


def rebuilt(alias, **given):
    password = connections[alias].settings_dict.get("PASSWORD") or ""
    options = log_options(AccountVersion, using=alias, password=password, partitions="2")
    return rebuild_on_spark(LocalContext(), options, "states", write=lambda line: None, **given)


def test_a_projection_is_rebuilt_from_versions(alias, accounts):
    declare(StateOf, "states")
    rebuilt(alias)
    rows = Status.objects.using(alias).order_by("pk")
    by_spark = list(rows.values())
    assert list(rows.values_list("stream", "status", "path")) == [
        ("a", "c3 refused: balance", '{"balance": 2, "owner": "äñ\' %s"}'),
        ("b", "c1 None", '{"balance": 0, "owner": "bob"}'),
        ("c", "c4 refused: ", "null"),
    ]
    rebuild("states")
    assert list(rows.values()) == by_spark


@pytest.mark.timeout(300)
@on("mariadb")
def test_an_audit_compares_rows_heads_and_versions(alias, accounts, spark, tmp_path):
    password = tmp_path / "password"
    password.write_text(str(connections[alias].settings_dict.get("PASSWORD") or ""))
    for id in ("row", "head", "state"):
        Account.execute(id, "open", {"owner": id}, command_id="x", using=alias)
    report = tmp_path / "report.html"

    def audit():
        output = StringIO()
        call_command(
            *("outbox_pipeline", "audit", "--log=account_version", "--database", alias),
            *("--password-file", str(password), "--report", str(report)),
            stdout=output,
        )
        return output.getvalue()

    assert "events=8 streams=6 defects=0" in audit()
    damage(alias)
    with pytest.raises(CommandError, match="has found 3 defects"):
        audit()
    text = report.read_text()
    assert "row: there is no row, and version 1 has a state" in text
    assert "head: the row is at version 7, the newest version is 1" in text
    assert "state: the row has another state than version 1" in text


@pytest.mark.timeout(300)
@on("postgres", "mariadb")
def test_what_was_erased_is_no_defect(alias, accounts, spark, tmp_path):
    """The archive has it as it was."""
    archive(alias, tmp_path, log=AccountVersion)
    erase(Account, "a", reason="Request 88", using=alias)
    said = []

    def audit():
        run = Pipeline(spark, source(alias, AccountVersion), AccountVersion, alias)
        return run_audit(run, archive=str(tmp_path), write=said.append)

    assert audit().sound, said
    QuerySet(AccountVersion, using=alias).filter(stream="b").update(data={}, metadata={"by": "x"})
    assert audit().counts == {"content_differs": 1}


def damage(alias):
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM account WHERE id = 'row'")
        cursor.execute("UPDATE account SET version = 7 WHERE id = 'head'")
        cursor.execute("UPDATE account SET state = '{}' WHERE id = 'state'")


@pytest.mark.timeout(300)
@on("postgres", "mariadb")
def test_a_split_log_is_audited(alias, spark, source_options, tmp_path):
    with split(AccountVersion, alias, by="stream", giving_up=["message_id"]):
        for n in range(6):
            Account.execute(f"a{n % 3}", "refuse_to_open", command_id=f"c{n}", using=alias)
        options = source_options(alias, model=AccountVersion)
        output = StringIO()
        given = ["--database", alias, "--report", str(tmp_path / "report.html")]
        if file := options.get("password_file"):
            given += ["--password-file", file]
        call_command("outbox_pipeline", "audit", "--log=account_version", *given, stdout=output)
        assert "defects=0" in output.getvalue()
