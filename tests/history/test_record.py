"""The lines of a history: what is written is read, and what is no record is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox_app.history import DamagedHistory, Record, Writer, read


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    writer = Writer(file, "writer-1")
    writer.write("publish", began=1.5, outcome="unknown", job="a", sender="")
    Writer(file, "writer-1").write("happening", name="fork")
    first, second = read([file])
    assert (first.what, first.who, first.began, first.outcome) == (
        *("publish", "writer-1"),
        *(1.5, "unknown"),
    )
    assert first.facts == {"job": "a", "sender": ""}
    assert second.began == second.ended
    assert Record.load(first.dump()) == first


def test_a_line_that_its_process_did_not_finish_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    whole = Record("id", {"id": 1}).dump()
    file.write_text(f"{whole}\n{whole[:-7]}")
    assert [record["id"] for record in read([file])] == [1]
    Writer(file, "the next process").write("id", id=2)
    assert [record["id"] for record in read([file])] == [1, 2]


def test_a_line_ends_with_a_newline_only(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"what": "dead", "job": "a", "reason": "x\u2028y"}\n', encoding="utf-8")
    assert [record["reason"] for record in read([file])] == ["x\u2028y"]


def test_shards_may_be_a_set(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    Writer(file, "w").write("incident", kind="takeover", shards={2, 1}, first=1, last=2)
    assert [record["shards"] for record in read([file])] == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("{", "is no record"),
        ("[1]", "is no record"),
        ('{"what": "guess"}', "'guess' is none of transaction, commit"),
        ('{"what": "stage", "job": "a"}', "'stage' needs row, shard"),
        ('{"what": "publish", "job": ["a"]}', "job must be a text or a number: ['a']"),
        (
            '{"what": "event", "position": 1, "stream": "", "version": null}',
            "version must be a whole number: None",
        ),
        ('{"what": "id", "id": 1, "began": "soon"}', "began must be a number or null: 'soon'"),
        (
            '{"what": "incident", "kind": "x", "shards": ["a"], "first": 1, "last": 2}',
            "shards must be whole numbers: ['a']",
        ),
        ('{"what": "id", "id": 1, "outcome": "maybe"}', "'maybe' is none of ok, failed, unknown"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, found: str) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(f"{Record('id', {'id': 1}).dump()}\n{line}\n")
    with pytest.raises(DamagedHistory, match=r"one\.jsonl, line 2") as error:
        list(read([file]))
    assert found in str(error.value)
