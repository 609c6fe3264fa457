"""The benchmark ``follow`` reads from an archive when each row was committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.follow import batches
from tests.pipeline.harness import archive, publish_some


@pytest.mark.django_db(transaction=True)
def test_each_row_is_of_its_batch_and_a_compaction_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 3)
    published = publish_some("default", 3), publish_some("default", 4)
    ids = [id for part in published for id in part]
    archive("default", tmp_path, rows=2)
    found = list(batches(str(tmp_path)))
    assert [id for _, part in found for id in part] == ids
    assert max(len(part) for _, part in found) <= 2
    times = [at for at, _ in found]
    assert times == sorted(times)
