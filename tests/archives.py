"""Archives for tests of other rooms, which are skipped without the packages of the extra spark."""

from __future__ import annotations

from typing import Any

import pytest


def archive(*args: Any, **options: Any) -> Any:
    """Archive a log: see ``tests.pipeline.harness``, which imports pyarrow."""
    pytest.importorskip("deltalake")
    from tests.pipeline import harness

    return harness.archive(*args, **options)
