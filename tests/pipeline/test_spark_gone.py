"""A Spark that has ended by itself, or never started: the command says why it failed."""

from __future__ import annotations

import signal

import pytest
from py4j.protocol import Py4JNetworkError

from outbox_app.pipeline.driver import pipeline as module
from outbox_app.pipeline.driver.pipeline import pipeline
from outbox_app.pipeline.exceptions import InvalidOption, PipelineError


class Gone:
    """A session whose Java has ended."""

    def stop(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "spark_session", lambda **_: Gone())
    monkeypatch.setattr(module, "is_running", lambda: False)


@pytest.mark.django_db
def test_what_was_done_is_done() -> None:
    with pipeline() as run:
        assert run.options.log == "outbox_event"


@pytest.mark.django_db
def test_the_handler_of_ctrl_c_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark's would end a worker in the middle of its work, which ends in its own way."""

    def begin(**_: object) -> Gone:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return Gone()

    monkeypatch.setattr(module, "spark_session", begin)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pipeline():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.django_db
def test_what_failed_is_no_finding_of_an_audit() -> None:
    with pytest.raises(PipelineError, match="Answer from Java") as ended, pipeline():
        raise Py4JNetworkError("Answer from Java side is empty")
    assert ended.value.returncode == 2


@pytest.mark.django_db
def test_no_session_is_begun_for_a_database_that_spark_cannot_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not be stopped, and the next pipeline would take it for somebody else's."""
    begun: list[object] = []
    monkeypatch.setattr(module, "spark_session", lambda **_: begun.append(1))
    monkeypatch.setattr(module, "database_url", lambda using: "oracle://db/shop")
    with pytest.raises(InvalidOption, match="begins with 'oracle'"), pipeline():
        pass
    assert begun == []
