"""The flash sale: many buyers want one of a few pieces, all at one moment, in one process.

``python -m example_project.demo.sale`` is that process, with a coroutine for each buyer. The
coroutine notes the buyer's answer in a file as soon as it arrives. The demo kills the process in
the middle of a batch, starts it again with the same buyers, and compares: each buyer must get the
same answer from both processes, and the answers must agree with the database.
"""

import argparse
import asyncio
from collections import Counter
from pathlib import Path

import django

#: Seconds that a buyer waits for its answer. On a slow machine the last batch takes long.
TIMEOUT = 300.0
SOLD, NONE_LEFT = "sold", "sold_out"


def main():
    """Let as many buyers ask as the command line says, and note their answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shelf", required=True)
    parser.add_argument("--buyers", type=int, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    options = parser.parse_args()
    django.setup()
    with options.answers.open("a", encoding="utf-8") as file:
        asyncio.run(sell(options.shelf, options.buyers, file))


async def sell(shelf, buyers, file):
    """Let each buyer ask once; the id of the command is the buyer's number."""
    from example_project.shop.models import Shelf

    async def buy(buyer):
        outcome = await Shelf.aexecute(
            shelf, "sell", {"buyer": buyer}, command_id=f"buyer-{buyer}", timeout=TIMEOUT
        )
        told = outcome.rejected.code if outcome.rejected else SOLD
        file.write(f"{buyer} {told} {outcome.version}\n")
        file.flush()

    await asyncio.gather(*(buy(buyer) for buyer in range(buyers)))


def answers(path):
    """Return the answer of each buyer, by its number; a half-written line does not count."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [line.split() for line in lines if line.endswith("\n")]
    return {int(buyer): (told, int(version)) for buyer, told, version in whole}


class SaleCount:
    """The buyers' answers, compared with the database and with the worker's notes."""

    def __init__(self, shelf, buyers, pieces, told_before, told):
        from example_project.shop.models import Execution, Shelf

        self.buyers, self.pieces = buyers, pieces
        self.told_before, self.told = told_before, told
        self.by_answer = Counter(answer for answer, _ in told.values())
        self.changed = [buyer for buyer, answer in told_before.items() if told.get(buyer) != answer]
        self.left = Shelf.objects.get(pk=shelf).on_hand
        # Version 1 is the command that filled the shelf, so the buyers' versions begin with 2.
        self.whole = [version for _, version in sorted(told.values(), key=lambda a: a[1])] == list(
            range(2, buyers + 2)
        )
        sold = {f"{shelf}/{buyer}" for buyer, (answer, _) in told.items() if answer == SOLD}
        runs = Execution.objects.filter(task="send_sale_receipt", subject__startswith=f"{shelf}/")
        self.receipts = set(runs.filter(state="SUCCESS").values_list("subject", flat=True))
        self.missing = sold - self.receipts
        self.leaked = self.receipts - sold

    @property
    def passed(self):
        expected = {SOLD: self.pieces, NONE_LEFT: self.buyers - self.pieces}
        wrong = self.changed or self.left or self.missing or self.leaked or not self.whole
        return not wrong and self.by_answer == +Counter(expected)

    def lines(self):
        """Return the result as text."""
        return (
            f"Sale: {self.buyers:,} buyers, {self.pieces:,} pieces; {self.by_answer[SOLD]:,} sold, "
            f"{self.by_answer[NONE_LEFT]:,} told no, {self.left:,} left\n"
            f"Asked again: {len(self.told_before):,} had an answer before the kill, "
            f"{len(self.changed):,} of them get another now\n"
            f"Receipts: {len(self.receipts):,} sent, {len(self.missing):,} missing, "
            f"{len(self.leaked):,} without a sale"
        )


if __name__ == "__main__":
    main()
