"""Sensitive values, masked even for users who may see messages: ``OUTBOX["SENSITIVE_KEYS"]``.

A value is masked if the name of its key contains one of the setting's words, at any depth of JSON.
Case and separators are ignored: ``api_key`` also matches ``apiKey`` and ``X-API-Key``. In text that
is not JSON (a repr, a damaged body), or is JSON inside a string, keys cannot be told from values:
such text is not shown at all if it contains a word. In other text, such as a URL with parameters,
values are masked if they are recognised. Positional arguments are not recognised.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ..conf import outbox_settings
from ..text import one_line, without_passwords

#: What is shown instead of a value.
MASK = "••••"
#: Keys under which Celery keeps arguments as text.
REPRS = ("argsrepr", "kwargsrepr", "args", "kwargs")


def masked(value: Any, *, hidden: str = MASK) -> Any:
    """Mask a value from ``json.loads``, in place; ``hidden`` replaces text that may be sensitive.

    Without recursion: untrusted data decides how deep the value is.
    """
    words = _words()
    whole = [value]  # the value may be a single string
    waiting: list[Any] = [whole]
    while waiting:
        each = waiting.pop()
        if _is_pair(each) and _is_sensitive(each[0], words):
            each[1] = MASK
        # The key of a dictionary is a name, the index of a list is not.
        for key, inner in each.items() if isinstance(each, dict) else enumerate(each):
            if isinstance(key, str) and _is_sensitive(key, words):
                each[key] = MASK
            elif isinstance(inner, dict | list):
                waiting.append(inner)
            elif isinstance(inner, str):
                # JSON inside a string, as from a webhook, even encoded twice; or a repr.
                is_whole = key in REPRS or inner.lstrip()[:1] in ("{", "[", '"')
                may_name = is_whole or ":" in inner or "=" in inner
                if may_name and _is_sensitive(_unescaped(inner), words):
                    each[key] = hidden if is_whole else masked_text(inner)
    return whole[0]


def may_be_sensitive(text: str) -> bool:
    """Return whether text that is not JSON has a sensitive word, so that it must not be shown."""
    return _is_sensitive(_unescaped(text), _words())


def masked_text(text: str) -> str:
    """Return the text of an exception, with the values of sensitive keys masked if recognised.

    ``password=x``, ``'token': 'x y'``, ``Authorization: Bearer x``. No promise: the text is free.
    """
    values = _values_of(tuple(outbox_settings().SENSITIVE_KEYS))
    return values.sub(rf"\g<key>{MASK}", without_passwords(text)) if values else text


def masked_line(text: str, limit: int) -> str:
    """Return the text of an exception, masked, on one line; cut before, as masking takes time.

    Its lines, such as the notes of the exception, are told apart by semicolons.
    """
    lines = masked_text(text[: 4 * limit]).strip()
    return one_line(re.sub(r"(?<=[^\s:;,.])\s*\n\s*", "; ", lines), limit)


def _words() -> list[str]:
    return [plain for word in outbox_settings().SENSITIVE_KEYS if (plain := _plain(word))]


@cache  # a message may have a hundred thousand texts
def _values_of(keys: tuple[str, ...]) -> re.Pattern[str] | None:
    names = "|".join(r"[\W_]?".join(map(re.escape, word)) for word in map(_plain, keys) if word)
    pattern = (
        rf"(?P<key>(?:{names})[\w-]{{0,40}}\\*['\"]?\s{{0,3}}[:=]+>?\s{{0,3}}\\*)"
        r"(?:\"[^\"]*\"?|'[^']*'?|(?:(?:Bearer|Basic|Digest|Token) )?[^\s,;)}\]]+)"
    )
    return re.compile(pattern, re.IGNORECASE) if names else None


def _plain(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _is_sensitive(name: Any, words: list[str]) -> bool:
    plain = _plain(str(name))
    return any(word in plain for word in words)


def _is_pair(value: Any) -> bool:
    # A header, as HTTP libraries list them. If the first text is a sentence, it names no header.
    is_pair = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    return is_pair and bool(re.fullmatch(r"[\w.-]{1,60}", value[0]))


def _unescaped(text: str) -> str:
    r"""Return the text with ``\u0070`` as the letter it stands for."""
    code = r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2}))"
    return re.sub(code, lambda found: chr(int(found[1] or found[2], 16)), text)
