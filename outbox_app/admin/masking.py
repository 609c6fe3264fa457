"""Sensitive values, masked even for those who may see messages: ``OUTBOX["SENSITIVE_KEYS"]``.

A value is masked where the name of its key contains one of those words, at any depth of JSON. Case
and separators do not count: ``api_key`` is ``apiKey`` and ``X-API-Key`` too. Where text is not JSON
(a repr, a damaged body) or is JSON inside a text, keys cannot be told from values: text that
contains such a word is not shown at all. An argument without a name may be sensitive unnoticed.
"""

from __future__ import annotations

import re
from typing import Any

from ..conf import outbox_settings
from ..text import one_line

#: What is shown instead of a value.
MASK = "••••"
#: Keys under which Celery keeps arguments as text.
REPRS = ("argsrepr", "kwargsrepr", "args", "kwargs")


def masked(value: Any, *, hidden: str = MASK) -> Any:
    """Mask what ``json.loads`` has returned, in place; ``hidden`` stands for such text.

    Without recursion: a stranger decides how deep it is.
    """
    words = _words()
    whole = [value]  # a text may be all there is
    waiting: list[Any] = [whole]
    while waiting:
        each = waiting.pop()
        if _is_pair(each) and _is_sensitive(each[0], words):
            each[1] = MASK
        # A key is a name, and a place in a list is none.
        for key, inner in each.items() if isinstance(each, dict) else enumerate(each):
            if isinstance(key, str) and _is_sensitive(key, words):
                each[key] = MASK
            elif isinstance(inner, dict | list):
                waiting.append(inner)
            elif (
                isinstance(inner, str)
                # JSON in a text, as of a webhook, also if it is a text in there; or a repr.
                and (key in REPRS or inner.lstrip()[:1] in ("{", "[", '"'))
                and _is_sensitive(_unescaped(inner), words)
            ):
                each[key] = hidden
    return whole[0]


def may_be_sensitive(text: str) -> bool:
    """Say whether text that is no JSON contains a sensitive word, so that it cannot be shown."""
    return _is_sensitive(_unescaped(text), _words())


def masked_text(text: str) -> str:
    """Return an exception's words with what follows a sensitive one masked, as far as it is seen.

    ``password=x``, ``'token': 'x y'``, ``Authorization: Bearer x``. No promise: words are free.
    """
    names = "|".join(r"[\W_]?".join(map(re.escape, word)) for word in _words())
    if not names:
        return text
    pattern = (
        rf"(?P<key>(?:{names})[\w-]{{0,40}}['\"]?\s{{0,3}}[:=]\s{{0,3}})"
        r"(?:\"[^\"]*\"?|'[^']*'?|(?:(?:Bearer|Basic|Digest|Token) )?[^\s,;)}\]]+)"
    )
    return re.sub(pattern, rf"\g<key>{MASK}", text, flags=re.IGNORECASE)


def masked_line(text: str, limit: int) -> str:
    """Return an exception's words, masked, on one line."""
    # Cut before as well: a pattern may take its time over a megabyte.
    return one_line(masked_text(text[: 4 * limit]), limit)


def _words() -> list[str]:
    return [plain for word in outbox_settings().SENSITIVE_KEYS if (plain := _plain(word))]


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _is_sensitive(name: Any, words: list[str]) -> bool:
    plain = _plain(str(name))
    return any(word in plain for word in words)


def _is_pair(value: Any) -> bool:
    # A header, as HTTP libraries list them. A sentence in the first place is none.
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and bool(re.fullmatch(r"[\w.-]{1,60}", value[0]))
    )


def _unescaped(text: str) -> str:
    r"""Return the text with ``\u0070`` as the letter it stands for."""
    return re.sub(
        r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))",
        lambda found: chr(int(found[1] or found[2], 16)),
        text,
    )
