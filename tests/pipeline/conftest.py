"""Options of the data source, and points at which something happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Event
from outbox_app.failpoints import set_failpoint
from outbox_app.pipeline.driver.pipeline import log_options

from . import shared_types
from .harness import publish_some


@pytest.fixture(scope="session", autouse=True)
def types_are_read_once() -> None:
    shared_types.share()


@pytest.fixture
def at() -> Iterator[Callable[[str, Callable[[], Any]], None]]:
    """``at(point, action)``: call it once, at this failpoint."""
    points: list[str] = []

    def arrange(point: str, action: Callable[[], Any]) -> None:
        def act() -> None:
            set_failpoint(point, None)
            action()

        points.append(point)
        set_failpoint(point, act)

    yield arrange
    for point in points:
        set_failpoint(point, None)


@pytest.fixture
def source_options(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """``source_options(alias)``: the options for reading the test's database.

    ``Options.of`` and Spark take them. Give further options by name; ``model`` is the log. The test
    must commit, so mark it ``transaction=True``.
    """

    def make(alias: str, *, model: Any = Event, **given: Any) -> dict[str, str]:
        if secret := connections[alias].settings_dict.get("PASSWORD"):
            file = tmp_path / f"password-{alias}"
            file.write_text(f"{secret}\n")
            given.setdefault("password_file", str(file))
        given.setdefault("partitions", 3)
        given.setdefault("connect_timeout", 5)
        texts = {name: str(value) for name, value in given.items()}
        options = log_options(model, using=alias, **texts)
        values = {each.name: getattr(options, each.name) for each in fields(options)}
        return {name: str(value) for name, value in values.items() if value != ""}

    return make


@pytest.fixture
def old(alias: str) -> Callable[[int], list[int]]:
    """``old(n)``: publish n events that are ten days old. Returns their positions."""

    def make(count: int) -> list[int]:
        positions = publish_some(alias, count)
        rows = Event.objects.using(alias).filter(pk__in=positions)
        rows.update(recorded_at=DatabaseNow() - timedelta(days=10))
        return positions

    return make
