"""Run by ``test_java``: the first of these tests loses its Java, in the order of the file."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def rows(spark):
    found = spark.range(3).persist()
    yield found
    found.unpersist()


def test_a_dies(spark, rows):
    assert rows.count() == 3
    java = spark.sparkContext._gateway.proc
    java.kill()
    java.wait()
    rows.count()


def test_b_has_rows(rows):
    assert rows.count() == 3


def test_c_has_a_session(spark):
    assert spark.range(2).count() == 2
