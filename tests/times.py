"""How long the tests of each folder take: ``python -m tests.times build/junit.xml``.

``.ci/run`` keeps the file. The table is Markdown, the longest folder comes first. ``--depth 2``
divides folders into those in them. Times are those of the tests, with setup and teardown, whichever
worker ran them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.times")
    parser.add_argument("file", type=Path, help="what pytest --junit-xml has written")
    parser.add_argument("--depth", type=int, default=1, help="levels of folders (default: 1)")
    options = parser.parse_args(arguments)
    print("\n".join(table(options.file, options.depth)))


def table(file: Path, depth: int = 1) -> Iterator[str]:
    """Yield the lines of the table.

    Args:
        file: A JUnit file of pytest.
        depth: How many levels of folders below ``tests`` have lines of their own.
    """
    tests: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(file).iter("testcase"):
        # tests.jobs.drain.test_drain.TestClass
        names = case.get("classname", "").split(".")
        folders = names[: next((n for n, name in enumerate(names) if name[:5] == "test_"), 1)]
        folder = "/".join(folders[: depth + 1])
        tests[folder] += 1
        seconds[folder] += float(case.get("time", 0))
    every = sum(seconds.values())
    yield "| folder | tests | seconds | share |"
    yield "|---|--:|--:|--:|"
    for folder, its in seconds.most_common():
        yield f"| `{folder}` | {tests[folder]:,} | {its:,.0f} | {its / (every or 1):.0%} |"
    yield f"| all | {tests.total():,} | {every:,.0f} | 100% |"


if __name__ == "__main__":
    main()
