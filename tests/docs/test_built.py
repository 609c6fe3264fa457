"""What the built documentation has beside its pages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Title(str):
    def astext(self) -> str:
        return str(self)


llms: Any = runpy.run_path(str(ROOT / "docs/llms.py"))


def build(folder: Path, *, name: str = "html", error: Exception | None = None) -> Path:
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    names = {str(page.with_suffix("")) for page in pages if page.parts[0] != "_build"}
    titles = {
        name: Title(re.findall(r"^# (.+)$", (ROOT / f"docs/{name}.md").read_text(), re.M)[0])
        for name in names
    }
    env = SimpleNamespace(found_docs=names, titles=titles)
    app = SimpleNamespace(env=env, outdir=folder, builder=SimpleNamespace(name=name))
    llms["write"](app, error)
    return folder / "llms.txt"


def test_programs_get_a_list_of_all_pages_by_kind(tmp_path: Path) -> None:
    text = build(tmp_path).read_text()
    assert text.startswith("# outbox_app\n\n> ")
    assert re.findall(r"^## (.+)$", text, re.M) == [
        "Tutorial",
        "How-to guides",
        "Reference",
        "Explanation",
    ]
    linked = re.findall(r"^- \[.+\]\(_sources/(.+)\.txt\)", text, re.M)
    assert linked[0] == "index.md"
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").glob("[!_]*/*.md")}
    pages.add("index.md")
    assert set(linked) == pages
    assert len(linked) == len(pages)


def test_other_builds_and_failed_ones_get_none(tmp_path: Path) -> None:
    assert not build(tmp_path, name="linkcheck").exists()
    assert not build(tmp_path, error=ValueError()).exists()


def test_agents_are_told_commands_and_folders_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    commands = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert commands
    assert commands <= set(targets)
    for name in re.findall(r"^\| `(\w+)/` \|", text, re.M):
        assert (ROOT / name).is_dir()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / target).is_file()
    assert len(text.split()) < 500
