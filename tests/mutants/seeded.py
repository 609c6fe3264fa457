"""What a seeded bug is, and how it gets into a copy of the project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class Unfit(Exception):
    """The code is no longer what a bug was written for."""


@dataclass(frozen=True)
class Bug:
    """A mistake of a line or two.

    Args:
        name: What the mistake is, in a few words with hyphens.
        promise: The promise that it breaks, such as ``"P3"``; ``"archive"`` for that of deletion.
        file: The module, below ``outbox_app``.
        edits: Pairs of the text that is there, exactly once, and the text that takes its place.
        tests: Files or node ids of pytest: the tests that have to fail.
        why: What goes wrong for a user.
        survived_at_first: Whether no test had noticed it when it was first planted.
    """

    name: str
    promise: str
    file: str
    edits: Sequence[tuple[str, str]]
    tests: Sequence[str]
    why: str
    survived_at_first: bool = False

    def planted(self, text: str) -> str:
        """Return the text of the module with the bug. Raises ``Unfit``."""
        for there, instead in self.edits:
            if (count := text.count(there)) != 1:
                raise Unfit(
                    f"The bug {self.name!r} replaces a text that outbox_app/{self.file} has "
                    f"{count} times, not once: {there!r:.200}. Write the bug for the new code."
                )
            text = text.replace(there, instead)
        return text

    def path(self, root: Path) -> Path:
        return root / "outbox_app" / self.file
