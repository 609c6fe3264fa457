"""Sessions: a new light one, an existing one, and an error without Java."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from outbox_app.pipeline.database import connect
from outbox_app.pipeline.exceptions import NoSpark
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.session import is_local, is_running, spark_session

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.system
@pytest.mark.parametrize("said", ["", "Unsupported class file major version 61"])
def test_a_pipeline_without_a_java_that_spark_runs_on(tmp_path, said):
    if said:  # a Java that is too old: it cannot load Spark's classes
        program = tmp_path / "java"
        program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    to = tmp_path / "archive"
    command = [sys.executable, "manage.py", "outbox_pipeline", "archive", "--to", str(to)]
    env = {**os.environ, "PATH": f"{tmp_path}:/bin" if said else str(tmp_path)}
    env |= {"DATABASE_URL": "sqlite://:memory:", "JAVA_HOME": ""}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search("Spark has not started.*Java 17.*Everything else", done.stderr)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not to.exists()


@pytest.mark.parametrize("name", ["pyspark.sql", "pyarrow", "deltalake"])
def test_without_pyspark(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "outbox_app.pipeline.source", raising=False)
    with pytest.raises(NoSpark, match=rf"{name} cannot be imported: pip install 'outbox-app\[spa"):
        spark_session()


@pytest.mark.django_db
def test_without_the_driver_of_the_database(monkeypatch):
    """As pyspark, pyarrow and deltalake were installed by hand."""
    monkeypatch.setitem(sys.modules, "outbox_app.pipeline.databases.sqlite", None)
    with pytest.raises(NoSpark, match=r"sqlite, cannot be imported: pip install 'outbox-app\[sp"):
        connect(Options(url="sqlite:///file"))


def test_a_session_that_is_there_is_taken_as_it_is(spark):
    assert spark_session(master="local[1]", settings={"spark.app.name": "other"}) is spark
    assert spark.sparkContext.master == "local[2]"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"


def test_a_session_of_another_thread_is_taken_and_left_running(spark):
    """Spark knows an active session for each thread: it would be stopped as one of the pipeline."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(is_running).result()
        assert (
            thread.submit(spark_session, settings={"spark.sql.ansi.enabled": "no"}).result()
            is spark
        )
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"


@pytest.mark.parametrize(("master", "bound"), [("spark://host:7077", False), ("local", True)])
def test_only_a_local_session_is_bound_to_this_machine(monkeypatch, master, bound):
    made = []

    def make(builder):
        made.append(builder._options)
        raise NoSpark("not started")

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", make)
    with pytest.raises(NoSpark):
        spark_session(master=master)
    assert ("spark.driver.host" in made[0]) == bound


def test_whose_executors_are_started_here(monkeypatch):
    assert is_local(None)
    assert is_local("local[2]")
    assert not is_local("spark://host:7077")
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert not is_local(None)
