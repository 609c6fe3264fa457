"""Errors that no retry will heal: the URL, the library, the user or the virtual host is wrong.

Each error is reported in one sentence: what is wrong, with which URL, and what to do. A URL is
shown without its password and options. An error of parsing a URL is shown without its text, which
may hold a part of the password. The drainer keeps trying, as the broker may be corrected.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from celery import Celery
from kombu import Producer

from ...exceptions import BrokerUnavailable
from ...text import error_text

#: What kombu raises if the library of a transport is not installed.
LIBRARY_MISSING = (ImportError, AttributeError, NameError)
#: What transports raise on connecting if the URL or a transport option is wrong.
WRONG_OPTION = (ImportError, LookupError, TypeError, ValueError)


def find_transport(app: Celery) -> Any:
    """Return the transport of an app's broker, without connecting."""
    try:
        app.conf.broker_write_url  # noqa: B018  # loads the configuration
    except Exception as error:  # any error of the project's configuration
        raise BrokerUnavailable(
            f"The configuration of Celery app {app.main!r} cannot be loaded here: "
            f"{error_text(error)}. "
            "Correct it, or stop the drainers of this host."
        ) from None
    try:
        return app.connection_for_write().transport
    except Exception as error:  # any error of kombu or of the transport's library
        raise BrokerUnavailable(" ".join(unusable(app, error))) from None


def without_batches() -> str:
    """Return a hint if this kombu publishes each message singly, else an empty string."""
    if hasattr(Producer, "batch"):
        return ""
    return (
        f"kombu {version('kombu')} publishes each job singly; 5.7 and later publish batches, "
        "which is several times as fast"
    )


def unusable(app: Celery, error: Exception) -> tuple[str, str]:
    """Return why no transport can be made of an app's ``broker_url``, and what to do."""
    if isinstance(error, LIBRARY_MISSING):
        why = "the library of its transport is missing, or cannot be imported"
        advised = (
            "Install it where drainers and workers run, for redis:// with: pip install "
            "'celery[redis]'."
        )
    elif isinstance(error, KeyError):
        why = str(error.args[0])
        advised = "Let broker_url begin with redis:// or amqp://, for example."
    else:
        why = "its broker_url cannot be read"
        advised = "Write it as redis://user:password@host:6379/0, the password percent-encoded."
    return f"{broker_at(app)} cannot be used: {why}.", advised


def unreachable(app: Celery, error: BaseException) -> BrokerUnavailable:
    """Return the exception for a broker that cannot be reached, with advice if there is any."""
    advised = _advice(error)
    # Not the repr of the error: redis-py's leaves out the message.
    words = f"{type(error).__name__}: {error}"
    if advised:
        words = words.rstrip(".") + "."
    for secret in {word for url in _urls(app) for word in re.findall(r"\w+", _secret(url))}:
        words = re.sub(rf"\b{secret}\b", "**", words)
    return BrokerUnavailable(f"{broker_at(app)} cannot be reached: {words}{advised}")


def public_url(app: Celery) -> str:
    """Return an app's ``broker_url`` without passwords and options, even if it is malformed."""
    return ";".join(map(_public, _urls(app)))


def broker_at(app: Celery) -> str:
    """Return the words for an app's broker and its URL."""
    return f"The broker of Celery app {app.main!r} at {public_url(app)}"


def _advice(error: BaseException) -> str:
    error = error.__cause__ or error
    code = getattr(error, "reply_code", None)
    if code == 403 or any(cls.__name__ == "AuthenticationError" for cls in type(error).__mro__):
        return " Correct the user and the password in broker_url, or the user's permissions."
    if code == 530 and "limit" not in str(error):  # the limit of connections: some will end
        return " Correct the virtual host in broker_url, or create it and let this user use it."
    if "DB index" in str(error):
        return " Correct the number of the database in broker_url."
    if isinstance(error, WRONG_OPTION):
        return " Correct broker_url or broker_transport_options."
    return ""


def _urls(app: Celery) -> list[str]:
    urls = app.conf.broker_write_url or "amqp://"
    return urls.split(";") if isinstance(urls, str) else list(map(str, urls))


def _split(url: str) -> tuple[str, str, str]:
    """Return scheme, user with password, and the rest. A password may hold any character."""
    scheme, rest = url.split("://", 1) if "://" in url else ("", url)
    user, _, place = rest.rpartition("@")
    return scheme and f"{scheme}://", user, place.partition("?")[0]


def _secret(url: str) -> str:
    user, colon, password = _split(url)[1].partition(":")
    return password if colon else user


def _public(url: str) -> str:
    scheme, user, place = _split(url)
    name, colon, _ = user.partition(":")
    shown = f"{name if colon else ''}:**@" if user else ""
    # Text without "@" may be a password without a host.
    readable = re.fullmatch(r"[^:/]*(:\d*)?(/[^:]*)?", place)
    return f"{scheme}{shown}{place if readable else '**'}"
