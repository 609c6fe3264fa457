"""The report of an audit, as a browser draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .window import Browser

#: How many lines the text of each cell has.
LINES = """cells => cells.map(cell => {
  const text = document.createRange();
  text.selectNodeContents(cell);
  return text.getClientRects().length;
})"""


@pytest.mark.parametrize("width", [380, 1280])
def test_numbers_are_not_broken_into_lines(tmp_path: Path, chromium: Browser, width: int) -> None:
    pytest.importorskip("pyarrow")
    from outbox_app.pipeline.defects import Audit
    from outbox_app.pipeline.driver.report import write_report
    from outbox_app.pipeline.figures import Figures

    counts = {"tail": 12_345_678, "gap": 1}
    audit = Audit("outbox_event", counts, [], 1, 1, 1.0)
    write_report(tmp_path / "audit.html", audit, figures=Figures([], [], []))

    def lines() -> list[int]:
        with chromium.context("", viewport={"width": width, "height": 900}) as context:
            page = context.new_page()
            page.goto(f"file://{tmp_path}/audit.html")
            cells = "figure th, figure td:nth-child(2)"
            found: list[int] = page.eval_on_selector_all(cells, LINES)
            return found

    assert chromium.run(lines) == [1, 1, 0, 1, 1]  # the bars have no head
