"""The base of all commands: a module's docstring is its command's help, and output is escaped.

``argparse`` joins a description into one paragraph, but the commands teach with lists and blank
lines. Lines and errors may hold untrusted text, so unprintable characters in them are escaped. On
the command line, so are characters that the encoding of the output lacks.
"""

from __future__ import annotations

import getpass
import inspect
import json
import logging
import os
import signal
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser, SystemCheckError
from django.utils import timezone

from ..database.clock import aware
from ..database.transaction_guard import LOST
from ..exceptions import InvalidArgument, OutboxError
from ..process.foreground import timeouts_of_a_call
from ..text import escaped, get_logger, one_line

#: The help of ``--database`` in commands on the outbox's database.
OUTBOX_ALIAS = "alias of the outbox (default: OUTBOX['DATABASE'], else by the routers)"
#: Options that select rows or a place. An empty value, as from a script's unset variable, would
#: select more than intended.
SELECTING = ("app", "archive", "archived", "database", "error", "key", "log", "queue", "sender",
             "task", "to")  # fmt: skip
#: The format of log lines if the project configures no logging. The time has its zone.
LINE = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"
UNSEEN = (
    "Progress is not shown: LOGGING has no level INFO for the logger 'outbox_app'. Set it in "
    "LOGGING['loggers']."
)


class OutboxCommand(BaseCommand):
    """A command whose help, its module's docstring, keeps its line breaks."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(
            prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process: Ctrl-C ends it without a traceback."""
        with suppress(AttributeError, OSError, ValueError):  # none, closed, or not Python's own
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    @property
    def user(self) -> str:
        name = f"manage.py {type(self).__module__.rpartition('.')[2]}"
        try:
            return f"{getpass.getuser()} ({name})"
        except (KeyError, OSError):  # a user id without a name, as in many containers
            return name

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; turn an error with words into a ``CommandError``; escape the message.

        ``OutboxError`` has an exit code of its own; that of a missing app or a wrong setting is 2.
        """
        try:
            _require_selections(options)
            ends = self._called_from_command_line  # type: ignore[attr-defined]
            lasts = ends or options.get("once") is False
            with nullcontext() if lasts else timeouts_of_a_call():
                return super().execute(*args, **options)
        except CommandError as error:
            if not isinstance(error, SystemCheckError):  # its text has colours and line breaks
                error.args = (escaped(error),)
            raise
        except LOST as error:
            text = one_line(f"{type(error).__name__}: {error}", 1000)
            raise CommandError(text) from error
        except OutboxError as error:
            raise CommandError(escaped(error), returncode=error.returncode) from error
        except ImproperlyConfigured as error:
            raise CommandError(escaped(error), returncode=2) from error

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        """Check no database: Django 6.1 checks all, and an unreachable one ends the command."""
        return super().get_check_kwargs(options) | {"databases": []}

    def add_foreground_arguments(
        self,
        parser: CommandParser,
        *,
        once: str,
        interval: str,
        database: str,
        processes: str,
        batch_size: str | None = None,
    ) -> None:
        """Declare the options of a command that runs until it is stopped, each with its help."""
        add = parser.add_argument
        add("--once", action="store_true", help=f"{once}, then stop (cron, tests)")
        add("--interval", type=float, metavar="SECONDS", help=interval)
        if batch_size is not None:
            add("--batch-size", type=int, metavar="N", help=batch_size)
        add("--database", metavar="ALIAS", help=database)
        add("--processes", type=int, default=1, metavar="N", help=f"{processes} (default 1)")

    def add_no_input(self, parser: CommandParser) -> None:
        """Declare the option to ask nothing, in both spellings of Django's own commands."""
        names = ("--noinput", "--no-input")
        parser.add_argument(*names, action="store_false", dest="interactive", help="do not ask")

    def run(self, function: Callable[..., int], **options: Any) -> None:
        """Run a function, with ``database`` as its ``using``, and exit with the code it returns."""
        names = inspect.signature(function).parameters.keys() & options.keys()
        arguments = {name: options[name] for name in names}
        logs = nullcontext() if "write" in arguments else self.logging()
        ends = self._called_from_command_line  # type: ignore[attr-defined]
        # Python, while it ends, sets the default for a handler, and a second signal would kill it.
        with self.handling_signals(then=signal.SIG_IGN if ends else None), logs:
            code = function(using=options["database"], **arguments)
        if code:
            raise SystemExit(code)

    @contextmanager
    def handling_signals(self, *, then: signal.Handlers | None = None) -> Iterator[None]:
        """Replace signal handlers that the block has set: by ``then``, or by those before it."""
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler not in (None, signal.getsignal(number)):
                    signal.signal(number, handler if then is None else then)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Show log records as ``LOGGING`` says, or on stdout if it configures no handler."""
        logger = get_logger("outbox_app")
        if logger.hasHandlers():
            if not logger.isEnabledFor(logging.INFO):
                self.stderr.write(UNSEEN)
            yield
            return
        handler, level = logging.StreamHandler(self.stdout), logger.level
        handler.setFormatter(logging.Formatter(LINE, "%Y-%m-%dT%H:%M:%S%z"))
        logger.addHandler(handler)
        logger.setLevel(level or logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    def confirm(self, question: str) -> None:
        """Ask for confirmation, and raise ``CommandError`` unless the answer is yes."""
        try:
            answer = input(f"{question} [y/N] ")
        except (EOFError, RuntimeError):  # standard input is closed
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Not confirmed, so nothing was changed. Scripts give --noinput.")

    def write(self, line: str) -> None:
        """Write a line, escaped, and flush it: a log collector may read from a pipe.

        A reader that has gone, as ``head``, ends the command. That is no failure of what ran.
        """
        try:
            self.stdout.write(escaped(line))
            self.stdout.flush()
        except BrokenPipeError:
            if self._called_from_command_line:  # type: ignore[attr-defined]
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at exit
            raise SystemExit(141) from None

    def remark(self, line: str) -> None:
        """Tell a person at a terminal, beside the output."""
        if self.stderr.isatty():
            self.stderr.write(line, style_func=str)

    def write_json(self, value: Any) -> None:
        """Write a value as JSON."""
        for line in json.dumps(value, indent=2, default=datetime.isoformat).splitlines():
            self.write(line)


def when(moment: datetime, *, using: str) -> str:
    """Return a time from a database as text, in the project's zone, as options take it."""
    return f"{timezone.localtime(aware(moment, using=using)):%Y-%m-%d %H:%M:%S}"


def _require_selections(options: dict[str, Any]) -> None:
    """Refuse empty selections."""
    for name in SELECTING:
        if options.get(name) == "":
            raise InvalidArgument(f"--{name} is empty. Nothing was done.")
