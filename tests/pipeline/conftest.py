"""One Spark session for all tests of the pipeline: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session: ``local[2]``, as light as a user gets it."""
    from outbox_app.pipeline.session import spark_session

    session = spark_session(master="local[2]", name="tests")
    yield session
    session.stop()
