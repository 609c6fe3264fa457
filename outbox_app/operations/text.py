"""Text of strangers, made harmless for a terminal and for a page.

Task names, reasons and payloads come from users of the project's users. Control characters
(terminal codes among them), text that runs backwards and lone surrogates are shown as escapes, and
the text is cut. HTML is not escaped here: templates do that.
"""

from __future__ import annotations

import re

#: Characters that are shown at most.
LIMIT = 10_000


def shown(text: object, limit: int = LIMIT) -> str:
    r"""Return the text with whatever cannot be seen as an escape: ``\x1b``, ``\u202e``, ``\ud800``.

    Args:
        text: Anything; ``str()`` is taken of it.
        limit: Characters after which it is cut. What was cut ends in an ellipsis.

    Returns:
        Text that every encoding of Unicode can encode. Line breaks and tabs stay.
    """
    given = str(text)
    kept = given[:limit]
    visible = "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in kept
    )
    return visible if len(given) <= limit else f"{visible}…"


def one_line(text: object, limit: int) -> str:
    """Return the text as ``shown`` does, on one line."""
    return shown(re.sub(r"[ \n\t]+", " ", str(text)[: 2 * limit]).strip(), limit)
