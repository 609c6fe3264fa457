"""The options of the data source, and the source of the password."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import MySQLdb
import pytest
from django.db import connections

from outbox_app.events.log.filter import EventFilter
from outbox_app.events.models import Event
from outbox_app.pipeline import archive_reader
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.driver import pipeline as driver
from outbox_app.pipeline.driver.pipeline import Pipeline
from outbox_app.pipeline.exceptions import InvalidOption, Unreachable
from outbox_app.pipeline.options import Options
from tests.faults.tools import on

from .harness import source

URL = "postgresql://reader@db.example:5433/shop"


def options(url=URL, **given):
    return Options.of({"url": url, **given})


def test_names_are_spelled_in_any_case():
    """Spark makes them small; people write them as they like."""
    given = {"URL": URL, "maxrowsperbatch": "7", "passwordEnv": "A", "statement_timeout": "1.5"}
    read = Options.of({**given, "tombstones": "TRUE"})
    assert (read.max_rows_per_batch, read.password_env, read.statement_timeout) == (7, "A", 1.5)
    assert read.tombstones


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Name the database"),
        ({"url": URL, "dbtable": "x"}, "no option 'dbtable'.*maxRowsPerBatch"),
        ({"url": "oracle://db/shop"}, "begins with 'oracle'"),
        ({"url": "db/shop"}, "begins with ''"),
        ({"url": "sqlite:///"}, "must name a file"),
        ({"url": "postgresql://[db/shop"}, "is invalid"),
        ({"url": "mysql://db:abc/shop"}, "is invalid"),
        ({"url": URL, "read": "rows"}, "events, heads or inbox"),
        ({"url": URL, "partitions": "0"}, "at least 1"),
        ({"url": URL, "partitions": "many"}, "a number"),
        ({"url": URL, "maxRowsPerBatch": "-1"}, "a number"),
        ({"url": URL, "maxRowsPerBatch": "99999999999"}, "a number"),
        ({"url": URL, "connectTimeout": "nan"}, "a number"),
        ({"url": URL, "statementTimeout": "inf"}, "a number"),
        ({"url": URL, "tombstones": "yes"}, "true or false"),
        ({"url": URL, "archive": "/a", "start": "{}"}, "leave out"),
        ({"url": URL, "archive": "/a", "read": "heads"}, "has events only"),
        ({"url": URL, "lowest": "1.5"}, "must be a position"),
    ],
    ids=str,
)
def test_nonsense(given, says):
    with pytest.raises(InvalidOption, match=says):
        Options.of(given)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://reader:s3cret@db/shop",
        "postgresql://db/shop?user=reader&password=s3cret",
        "postgresql://db/shop?sslpassword=s3cret",
        "mysql://db/shop?PassWd=s3cret",
        "//reader:s3cret@db/shop",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url):
    with pytest.raises(InvalidOption, match="passwordFile") as raised:
        Options.of({"url": url})
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("rest", ["", "/x@db/shop", "#x@db/shop", "?x@db/shop", "/shop"])
def test_what_may_be_a_part_of_a_password_is_not_repeated(rest):
    """It was not percent-encoded, or the host was left out."""
    with pytest.raises(InvalidOption, match="percent-encode its parts") as raised:
        Options.of({"url": f"postgresql://reader:s3cret{rest}"})
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "vendor", "parameters"),
    [
        (URL, "postgresql", {"host": "db.example", "port": "5433", "user": "reader"}),
        ("postgres://db/shop", "postgresql", {"host": "db"}),
        ("mariadb://r%40x@db/shop", "mysql", {"host": "db", "user": "r@x"}),
        ("mysql:///shop?unix_socket=/run/s", "mysql", {"unix_socket": "/run/s"}),
        ("postgresql:///shop?host=/run/pg", "postgresql", {"host": "/run/pg"}),
    ],
)
def test_addresses(url, vendor, parameters):
    read = options(url)
    assert read.vendor == vendor
    assert read.parameters == {**parameters, "dbname": "shop"}


def test_files_of_sqlite():
    assert options("sqlite:////data/a%20b.db").parameters == {"dbname": "/data/a b.db"}
    assert options("sqlite:///here.db").parameters == {"dbname": "here.db"}


def test_topics_and_types():
    assert options().only == EventFilter()
    assert options(topics="eu,us", types="order.*").only == EventFilter(["eu", "us"], ["order.*"])
    spaced = options(topics="eu , us", types="order.*,  user")  # what ends with one may be a name
    assert spaced.only == EventFilter(["eu ", "us"], ["order.*", "user"])


def test_no_archive_is_none(monkeypatch):
    monkeypatch.setattr(archive_reader, "frame", lambda session, options, schema: options)
    run = Pipeline(None, options(), Event, "default")
    assert [run.read(archive=none).archive for none in ("", None)] == ["", ""]


def test_secrets(tmp_path, monkeypatch):
    file = tmp_path / "password"
    file.write_text("s3 cret\r\n")
    monkeypatch.setenv("PASS", "other")
    assert options().secret() is None
    assert options(password="given").secret() == "given"
    assert options(passwordEnv="PASS").secret() == "other"
    assert options(passwordFile=str(file)).secret() == "s3 cret"
    assert "given" not in repr(options(password="given"))


def test_secrets_that_are_not_there(tmp_path):
    with pytest.raises(Unreachable, match=r"NO_SUCH, is not set.*Set the variable where"):
        options(passwordEnv="NO_SUCH").secret()
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(Unreachable, match=rf"{path}, cannot be read.*every executor"):
            options(passwordFile=str(path)).secret()


def test_a_relative_archive_is_that_of_the_driver(tmp_path, monkeypatch):
    """Executors have working folders of their own."""
    monkeypatch.chdir(tmp_path)
    options = Options(url="sqlite:///log.sqlite3", archive="archive")
    assert options.archive == Options.of(options.texts()).archive == str(tmp_path / "archive")
    assert replace(options, archive="s3://bucket/log").archive == "s3://bucket/log"


@pytest.mark.parametrize("vendor", ["postgresql", "mysql"])
@pytest.mark.parametrize(
    ("host", "port"),
    [("db.example", "5432"), ("::1", "5432"), ("::1", ""), ("a,b", "1,2"), ("::1,::2", "1,2")],
)
def test_hosts_are_those_of_django(monkeypatch, vendor, host, port):
    """Also an IPv6 address, and several hosts with a port each."""
    values = {"NAME": "shop", "HOST": host, "PORT": port}
    connection = SimpleNamespace(vendor=vendor, settings_dict=values)
    monkeypatch.setattr(driver, "connections", {"x": connection})
    expected = {"dbname": "shop", "host": host, "port": port}
    assert {"port": "", **options(driver.database_url("x")).parameters} == expected


VARIABLE = "OUTBOX_PIPELINE_PASSWORD_INBOX"
SHOP = {"NAME": "shop", "HOST": "db", "USER": "shop", "PASSWORD": "x"}


@pytest.mark.parametrize(
    ("inbox", "expected"),
    [
        # Another role of the same database: Spark reads the log with the role it has.
        ({"USER": "app", "PASSWORD": ""}, ("shop@db/shop", "/run/secret", "")),
        ({"NAME": "inbox"}, ("shop@db/inbox", "/run/secret", "")),
        ({"NAME": "inbox", "PASSWORD": "y"}, ("shop@db/inbox", "", VARIABLE)),
        ({"NAME": "inbox", "USER": "app"}, ("app@db/inbox", "", VARIABLE)),
        ({"NAME": "inbox", "PASSWORD": ""}, ("shop@db/inbox", "", "")),
        ({"OPTIONS": {"service": "b"}}, ("shop@db/shop?service=b", "/run/secret", "")),
    ],
)
def test_where_the_password_of_an_inbox_elsewhere_is(monkeypatch, inbox, expected):
    """On a cluster, whose processes know what the command was told."""
    databases = {"log": SHOP, "inbox": {**SHOP, **inbox}}
    made = {
        name: SimpleNamespace(vendor="postgresql", settings_dict=values)
        for name, values in databases.items()
    }
    monkeypatch.setattr(driver, "connections", made)
    options = driver.log_options(Event, using="log", password_file="/run/secret")
    found = Pipeline(None, options, Event, "log").elsewhere("inbox").options
    url, *named = expected
    assert found.url == f"postgresql://{url}"
    assert [found.password_file, found.password_env] == named
    # Processes that are started here are given all passwords.
    monkeypatch.setenv(VARIABLE, "y")
    found = Pipeline(None, options, Event, "log").elsewhere("inbox").options
    assert found.password_file == ""


@pytest.fixture
def given(alias, monkeypatch):
    """``given(OPTIONS)``: connect to the database with these OPTIONS."""

    def make(options):
        before = connections[alias].settings_dict["OPTIONS"]
        monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", {**before, **options})

    return make


@on("postgres")
def test_options_of_a_postgresql_database(alias, given):
    given({"prepare_threshold": 5, "sslrootcert": Path("/etc/ca.pem"), "connect_timeout": 3})
    with closing(connect(source(alias))) as database:
        assert database.options.parameters["sslrootcert"] == "/etc/ca.pem"
        assert database.run("SELECT 1", []) == [(1,)]


@on("mariadb")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"ssl_mode": "VERIFY_CA", "ssl": {"ca": Path("/ca")}},
            {"ssl_mode": "VERIFY_CA", "ca": "/ca"},
        ),
        ({"ssl": True}, {"ssl_mode": "REQUIRED"}),
        ({"ssl": None}, {}),
    ],
)
def test_a_mysql_database_is_asked_for_tls_as_django_asks_it(
    alias, given, monkeypatch, options, expected
):
    given(options)
    asked, connecting = [], MySQLdb.connect

    def spied(**parameters):
        ssl = parameters.pop("ssl", {})
        asked.append({**ssl, **{n: v for n, v in parameters.items() if n.startswith("ssl")}})
        parameters.pop("ssl_mode", None)
        return connecting(**parameters)

    monkeypatch.setattr(MySQLdb, "connect", spied)
    connect(source(alias)).close()
    assert asked == [expected]
