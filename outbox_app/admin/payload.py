"""A job's message, for display, with sensitive values masked.

The envelope is our own JSON. The body is decoded only if it is JSON, and not compressed. Any other
body (pickle, yaml, a compressed one) is shown as its type and size, and never loaded. No input
makes this module raise: damaged text is shown as it is, unless it may be sensitive (see
``masking``). Large text is cut before it is processed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from django.db.models import Q, QuerySet, TextField, Value
from django.db.models.functions import Concat, Replace
from django.utils.translation import gettext as _

from ..conf import outbox_settings
from ..models import StagedJob
from ..models.job import JobMessage
from ..text import LIMIT, one_line, shown
from .masking import masked, may_be_sensitive

#: The longest text that is parsed, in characters. A longer one is shown as it was written.
PARSED = 1024 * 1024
#: The content type of a body that is decoded.
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class TextBlock:
    """One part of a message: a note on what it is, and its text, if there is text to read."""

    note: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    body: TextBlock
    headers: TextBlock
    #: Route, priority, properties and the rest.
    options: TextBlock
    due: str
    expires: str
    #: The W3C ``traceparent``, or empty.
    trace: str
    #: The arguments as in a call; "…" if they are not decoded, None if the message is damaged.
    arguments: str | None


#: A trace's ids and flags, and nothing else, as the header is untrusted text.
TRACEPARENT = r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"


def payload(job: JobMessage) -> Payload:
    envelope = parsed(_text(job.envelope))  # not cut, as this module needs fields of it
    if not isinstance(envelope, dict):
        damaged = _as_it_is(_("The envelope is damaged. It is shown as it is."), job.envelope)
        body = TextBlock(_opaque(_("of unknown type"), len(_bytes(job.body))))
        return Payload(body, damaged, TextBlock(""), "", "", "", None)
    headers = envelope.pop("headers", {})
    times = headers if isinstance(headers, dict) else {}
    held = job.available_at if isinstance(job, StagedJob) else None
    due = times.get("eta") or held or ""
    expires = envelope.get("expires") or times.get("expires") or ""
    trace = str(times.get("traceparent") or "")
    return Payload(
        body=_body(_bytes(job.body), envelope, times),
        headers=data_of(headers),
        options=data_of({name: value for name, value in envelope.items() if value}),
        due=shown(due, 100),
        expires=shown(expires, 100),
        trace=trace if re.fullmatch(TRACEPARENT, trace) else "",
        arguments=_arguments(_bytes(job.body), envelope, times),
    )


def _arguments(body: bytes, envelope: dict[str, Any], headers: dict[str, Any]) -> str | None:
    if envelope.get("content_type") != JSON or headers.get("compression") or len(body) > PARSED:
        return "…"
    value = parsed(_text(body))
    if value is _UNPARSED:
        return None
    try:
        match masked(value):
            case [list(args), dict(kwargs), *_]:
                parts = [*map(_written, args)]
                parts += [f"{name}={_written(each)}" for name, each in kwargs.items()]
                return one_line(", ".join(parts), 300)
    except RecursionError:  # nested too deeply
        pass
    return "…"


def _written(value: Any) -> str:
    """Return a value as in a call; what kombu marks, such as a UUID or a time, as its type."""
    match value:
        case {"__type__": str(kind), "__value__": {"hex": str(text)} | str(text)} if (
            len(value) == 2
        ):
            return f"{kind}({text!r})"
        case list():
            return f"[{', '.join(map(_written, value))}]"
        case dict():
            parts = (f"{name!r}: {_written(each)}" for name, each in value.items())
            return f"{{{', '.join(parts)}}}"
    return repr(value)


def difference_of(before: Any, after: Any) -> TextBlock:
    """Return how one document differs from another, masked, in the order of their keys."""
    texts = [data_of(json.loads(json.dumps(each, sort_keys=True))).text for each in (before, after)]
    old, new = (str(text).split("\n") for text in texts)
    lines = list(unified_diff(old, new, lineterm=""))[2:]
    if lines:
        return TextBlock("", "\n".join(lines))
    same = _("No difference.")
    return TextBlock(same if before == after else _("They differ in values masked or not shown."))


def _body(body: bytes, envelope: dict[str, Any], headers: dict[str, Any]) -> TextBlock:
    kind = str(envelope.get("content_type") or _("no content type"))
    compression = headers.get("compression")
    if kind != JSON or compression:
        if compression:
            kind = f"{kind}, {compression}"
        return TextBlock(_opaque(kind, len(body)))
    note = _("JSON, %(size)d bytes.") % {"size": len(body)}
    text = body[: PARSED + 1].decode(errors="backslashreplace")
    return json_of(text, note)


_UNPARSED = object()


def parsed(text: str) -> Any:
    """Return the value of a JSON text, or an object that is no JSON value if it is damaged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNPARSED


def json_of(text: str, note: str = "") -> TextBlock:
    value = parsed(text) if len(text) <= PARSED else _UNPARSED
    return _as_it_is(note, text) if value is _UNPARSED else data_of(value, note)


def data_of(value: Any, note: str = "") -> TextBlock:
    try:
        hidden = _("Not shown: it may hold sensitive values.")
        plain = masked(value, hidden=hidden)
        return TextBlock(note, _cut(json.dumps(plain, indent=2, ensure_ascii=False)))
    except RecursionError:
        return TextBlock(f"{note} {_('Nested too deeply to be shown.')}")


def _as_it_is(note: str, text: object) -> TextBlock:
    content = _text(text)
    if may_be_sensitive(content[: LIMIT + 100]):
        return TextBlock(
            f"{note} {_('Not shown: it is not JSON that can be masked, and may be sensitive.')}"
        )
    return TextBlock(note, _cut(content))


def _cut(text: str) -> str:
    if len(text) <= LIMIT:
        return shown(text)
    more = _("Cut: the first %(limit)d characters are shown.") % {"limit": LIMIT}
    return f"{shown(text)}\n\n{more}"


def _opaque(kind: str, size: int) -> str:
    values = {"kind": shown(kind, 200), "size": size}
    return _("Opaque: %(kind)s, %(size)d bytes, not decoded.") % values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _bytes(value).decode(errors="backslashreplace")


def _bytes(value: Any) -> bytes:
    # SQLite returns text if the row was edited by hand.
    return (
        value.encode(errors="backslashreplace") if isinstance(value, str) else bytes(value or b"")
    )


def in_messages(rows: QuerySet[Any], term: str) -> tuple[QuerySet[Any], Q]:
    """Return jobs, and the condition that their message has the text and nothing sensitive.

    Otherwise a user could guess a masked value, bit by bit, by whether a search finds the row.
    """
    found = Q(envelope__contains=json.dumps(term)[1:-1])  # escaped as in the envelope
    words = ("".join(filter(str.isalnum, word)) for word in outbox_settings().SENSITIVE_KEYS)
    sensitive = "|".join("[^a-zA-Z0-9]*".join(map(_cases, word)) for word in words if word)
    if not sensitive:
        return rows, found
    # Leave the task's name out: a task with a name like charge_card would never be found.
    name: Any = Concat(Value('"task": "'), "task", Value('"'))
    nameless = Replace("envelope", name, Value(""), output_field=TextField())
    return rows.alias(nameless=nameless), found & ~Q(nameless__regex=sensitive)


def _cases(letter: str) -> str:
    """Return a regular expression for a letter in JSON that every database understands."""
    cases = sorted({json.dumps(each)[1:-1] for each in (letter.lower(), letter.upper())})
    return f"[{''.join(cases)}]" if letter.isascii() else f"({'|'.join(map(re.escape, cases))})"
