"""One subscription beside the writers: its lag, and how long it takes to catch up at the end.

The writers (see ``writers``) write 6,000 rows a second, then 16,000, for 100 seconds each:
2,200,000 rows. Each rate has its own log. If the machine cannot write at a rate beside a reader,
the result has the rate that it reached, and a last run at four fifths of that rate shows whether
the lag is bounded: the median lag of the last third of the rows is compared with the third before.
"""

from __future__ import annotations

import statistics
from typing import Any

import django

from . import losses
from .books import Book
from .writers import write

ASKED = {
    "lost": "0",
    "lag_growth_bounded": "at most 1.5",
    "reached_6000": "at least 0.95",
}
RATES = (6_000, 16_000)
SECONDS = 100.0
NAME = "one"
#: If a rate is not reached, lag must be bounded at this fraction of the rate that was reached.
BELOW = 0.8


def run(*, scale: float = 1.0, quick: bool = False) -> dict[str, Any]:
    """Run each rate.

    Args:
        scale: Fraction of the time for which the writers write.
        quick: Write for a fiftieth of the time.

    Returns:
        ``ratios``, ``asked``, and ``rounds``, one for each rate: the rate asked for and the rows
        written, the lag in seconds, and the seconds from the last commit to the last delivery.
    """
    django.setup()
    seconds = SECONDS * (0.02 if quick else scale)
    rounds = [_at(rate, seconds) for rate in RATES]
    slow = [each for each in rounds if each["rows_per_second"] < 0.95 * each["asked"]]
    if slow:
        rounds.append(_at(BELOW * slow[0]["rows_per_second"], seconds))
    ratios = {f"reached_{r['asked']:.0f}": r["rows_per_second"] / r["asked"] for r in rounds[:2]}
    ratios["lag_growth_bounded"] = rounds[-1]["lag_growth"]
    ratios["lost"] = sum(each["lost"] for each in rounds)
    ratios = {name: round(value, 4) for name, value in ratios.items()}
    return {"ratios": ratios, "asked": ASKED, "rounds": rounds}


def _at(rate: float, seconds: float) -> dict[str, Any]:
    """Write at a rate beside one reader with one partition."""
    reader = losses.subscription(NAME, partitions=1)
    with losses.scratch_database():
        with losses.reading({NAME: [reader]}):
            written = write(rows_per_second=rate, seconds=seconds)
            losses.wait_until_done([NAME], len(written.ids))
        book = Book.read([written])
        verdict = book.judge(NAME)
        found = growth(book.lags(NAME))
    lag = verdict["lag_seconds"]
    print(
        f"asked for {rate:,.0f} rows/s: wrote {written.summary['rows_per_second']:,}, lag p50 "
        f"{lag['median']} s, p99 {lag['p99']} s, empty after {verdict['done_after_last_commit']} s",
        flush=True,
    )
    return {"asked": rate, **written.summary, **verdict, "lag_growth": found}


def growth(lags: list[tuple[float, float]]) -> float:
    """Return the median lag of the last third of the rows, divided by that of the third before."""
    third = max(1, len(lags) // 3)
    ordered = [lag for _, lag in sorted(lags)]
    before, last = ordered[-2 * third : -third] or ordered, ordered[-third:]
    return round(statistics.median(last) / max(statistics.median(before), 0.001), 3)
