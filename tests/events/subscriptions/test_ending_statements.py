"""The statements that end a transaction, with any comments and blanks before them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outbox_app.database.transaction_guard import ending


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        "  commit work",
        "/* a */ -- b\n COMMIT",
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "BEGIN",
        "START TRANSACTION READ ONLY",
        "END",
        "ABORT",
        "PREPARE TRANSACTION 'x'",
        "SET autocommit = 1",
        "SET @@session.autocommit=1",
        "SELECT ';'; COMMIT",
        b"commit",
    ],
)
@pytest.mark.parametrize("vendor", ["postgresql", "mysql", "sqlite"])
def test_statements_that_end_a_transaction(vendor, sql):
    assert ending(sql, SimpleNamespace(vendor=vendor))


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE x (y int)",
        "create or replace view x AS SELECT 1",
        "DROP TABLE x",
        "ALTER TABLE x ADD y int",
        "TRUNCATE x",
        "RENAME TABLE x TO y",
        "LOCK TABLES x WRITE",
        "UNLOCK TABLES",
        "ANALYZE TABLE x",
        "ANALYZE LOCAL TABLE x",
        "OPTIMIZE TABLE x",
        "FLUSH TABLES",
        "GRANT ALL ON x TO y",
        "SET PASSWORD = 'x'",
        "/*!50000 COMMIT */",
        "/*M!100100 CREATE TABLE x (y int) */",
        "# a\nDROP TABLE x",
        r"SELECT '\';'; DROP TABLE x",
    ],
)
def test_statements_that_commit_by_themselves_on_mysql(sql):
    assert ending(sql, SimpleNamespace(vendor="mysql"))


@pytest.mark.parametrize(
    ("vendor", "sql"),
    [
        *[
            (vendor, sql)
            for vendor in ("postgresql", "mysql", "sqlite")
            for sql in (
                "SAVEPOINT x",
                "ROLLBACK TO SAVEPOINT x",
                "ROLLBACK /* a */ WORK TO x",
                "RELEASE SAVEPOINT x",
                "SELECT 'COMMIT'",
                "INSERT INTO x VALUES ('; COMMIT')",
                "INSERT INTO x VALUES ('it''s; COMMIT')",
                'SELECT 1 AS "; COMMIT"',
                "UPDATE x SET y = 1",
                "DELETE FROM commit_log",
                "SELECT 1 -- ; COMMIT",
                "SELECT 1 /* ; COMMIT */",
            )
        ],
        ("postgresql", r"SELECT 'C:\', '; COMMIT'"),
        ("postgresql", r"SELECT E'it\'s; COMMIT'"),
        ("postgresql", "DO $x$ BEGIN PERFORM 1; END $x$"),
        ("postgresql", "SELECT data #> '{a}'; SELECT 1"),
        ("postgresql", "CREATE TABLE x (y int)"),
        ("sqlite", "DROP TABLE x"),
        ("mysql", "CREATE TEMPORARY TABLE x (y int)"),
        ("mysql", "CREATE OR REPLACE TEMPORARY TABLE x (y int)"),
        ("mysql", "DROP TEMPORARY TABLE x"),
        ("mysql", "ANALYZE SELECT 1"),
        ("mysql", "SET foreign_key_checks = 0"),
        ("mysql", "SELECT 1 LOCK IN SHARE MODE"),
    ],
)
def test_statements_that_do_not(vendor, sql):
    assert not ending(sql, SimpleNamespace(vendor=vendor))
