"""Sessions: a new light one, an existing one, and an error without Java."""

from __future__ import annotations

import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import CommandError, call_command
from pyspark import SparkContext
from pyspark.sql import SparkSession

from outbox_app.exceptions import NoSpark
from outbox_app.pipeline import session
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.session import is_local, is_running, require_java, spark_session


@pytest.fixture
def java(tmp_path, monkeypatch):
    """``java(version)``: put a fake Java of this version on the path, as the only one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")

    def make(version):
        program = tmp_path / "bin" / "java"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho 'Picked up options' >&2\necho '{version}' >&2\n")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        return tmp_path

    return make


@pytest.mark.parametrize("version", ["17", "17.0.9", "21.0.1", "25-ea"])
def test_a_java_that_is_new_enough(java, version):
    java(f'openjdk version "{version}" 2023-10-17')
    require_java()


@pytest.mark.parametrize("said", ['openjdk version "11.0.2" 2019', 'java version "1.8.0_292"', "?"])
def test_a_java_that_is_too_old(java, said):
    java(said)
    with pytest.raises(NoSpark, match=r"needs Java 17 or later; java says .*Install Java 17"):
        require_java()


def test_java_home_comes_first(java, monkeypatch, tmp_path):
    java('openjdk version "17"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    require_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "wrong"))
    with pytest.raises(NoSpark, match=f"program {tmp_path}/wrong/bin/java.*JAVA_HOME"):
        require_java()


@pytest.mark.parametrize("said", ["", 'version "11.0.2"'])
@pytest.mark.django_db
def test_a_pipeline_without_java(java, monkeypatch, tmp_path, said):
    java(said) if said else monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(CommandError, match=r"Install Java 17.*Everything else") as raised:
        call_command("outbox_pipeline", "archive", "--to", str(tmp_path / "archive"))
    assert raised.value.returncode == 2
    assert not (tmp_path / "archive").exists()


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

    monkeypatch.setattr(session, "require_java", lambda: None)
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
