"""One canonical JSON for events: what every database stores and gives back alike.

Strict UTF-8, no NaN, no Infinity, no NUL, at most 30 levels (MariaDB stores no more than 32). What
``DjangoJSONEncoder`` knows (dates, decimals, UUIDs) becomes text. Keys become strings, as in JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from ..conf import outbox_settings
from ..exceptions import InvalidEvent

MAX_DEPTH = 30
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def canonical(field: str, value: Any) -> Any:
    """Return ``value`` as readers will see it: encoded, checked and decoded again.

    Args:
        field: What it is, for the error.
        value: What JSON, or ``DjangoJSONEncoder``, can hold.

    Raises:
        InvalidEvent: It cannot be stored on every database.
    """
    try:
        text = json.dumps(value, cls=DjangoJSONEncoder, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(
            f"{field} cannot be stored as JSON: {error}. Use strings, numbers, booleans, None, "
            "lists and dictionaries."
        ) from error
    limit = outbox_settings().MAX_EVENT_BYTES
    if size > limit:
        raise InvalidEvent(
            f"{field} is {size} bytes of JSON; at most {limit} are possible "
            "(OUTBOX['MAX_EVENT_BYTES']). Store the bulk elsewhere and publish its key."
        )
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidEvent(f"{field} holds a NUL character (\\u0000). Remove it.")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise InvalidEvent(
            f"{field} is nested {_depth(text)} levels deep; at most {MAX_DEPTH} are possible."
        )
    return json.loads(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in _STRINGS.sub("", text):
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest
