"""A test that needs a server which its module names, for ``test_needs``."""

from __future__ import annotations

import pytest


def test_asks(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("redis_url")
