"""What the commands share: a help text that is shown as it was written, and output that is escaped.

``argparse`` fills a description into one paragraph. These teach with lists and blank lines. Lines
and errors hold text of strangers: no character of theirs reaches the terminal but what can be seen.
"""

from __future__ import annotations

import getpass
import inspect
import json
import logging
import os
import signal
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser, SystemCheckError
from django.utils import timezone

from ..exceptions import InvalidArgument, OutboxError
from ..models.clock import aware
from ..process.enclosure import LOST
from ..text import escaped, get_logger, one_line, storable

#: The help of ``--database``, where it is the outbox's.
OUTBOX_ALIAS = "alias of the outbox (default: OUTBOX['DATABASE'], else what the routers say)"
#: Options that select, or say where. An empty one, as of a script's variable that is not set, would
#: select more than is meant.
SELECTING = ("app", "archive", "archived", "database", "error", "key", "log", "queue", "sender",
             "task", "to")  # fmt: skip
#: A line of the log where the project configures none; the time has its zone.
LINE = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"
UNSEEN = (
    "Progress is not shown: LOGGING has no level INFO for the logger 'outbox_app' "
    "(docs/howto/deploy.md)."
)


class TeachingCommand(BaseCommand):
    """A command whose ``help`` keeps its line breaks, and whose lines are flushed."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        return super().create_parser(
            prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs
        )

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            self.stderr.write("Interrupted. Nothing is lost: run it again.")
            raise SystemExit(130) from None
        except BrokenPipeError:  # of head, which has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more
            raise SystemExit(141) from None

    @property
    def user(self) -> str:
        name = f"manage.py {type(self).__module__.rpartition('.')[2]}"
        try:
            return f"{getpass.getuser()} ({name})"
        except (KeyError, OSError):  # a user id without a name, as in many containers
            return name

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; say an ``OutboxError`` as Django says a ``CommandError``, escaped."""
        try:
            _require_sound(options)
            return super().execute(*args, **options)
        except CommandError as error:
            if not isinstance(error, SystemCheckError):  # has colours, and lines of its own
                error.args = (escaped(error),)
            raise
        except LOST as error:
            text = one_line(f"{type(error).__name__}: {error}", 1000)
            raise CommandError(text) from error
        except OutboxError as error:
            raise CommandError(escaped(error), returncode=self.exit_code(error)) from error

    def exit_code(self, error: OutboxError) -> int:
        return error.returncode

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        """Name no database: Django 6.1 would ask all, and one that is away ends the command."""
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
        """Declare that nothing is asked, in both spellings of Django's own commands."""
        names = ("--noinput", "--no-input")
        parser.add_argument(*names, action="store_false", dest="interactive", help="do not ask")

    def run(self, function: Callable[..., int], **options: Any) -> None:
        """Run what returns an exit code, and exit with it; ``database`` is its ``using``."""
        names = inspect.signature(function).parameters.keys() & options.keys()
        given = {name: options[name] for name in names}
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            with nullcontext() if "write" in given else self.logging():
                code = function(using=options["database"], **given)
        finally:  # the code that has called it goes on, and is to be stopped as before
            for number, handler in before.items():
                is_changed = handler not in (None, signal.getsignal(number))
                if is_changed and not self._called_from_command_line:  # type: ignore[attr-defined]
                    signal.signal(number, handler)
        if code:
            raise SystemExit(code)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Show what is logged: as ``LOGGING`` says, or where it says nothing, here."""
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
        """Ask a person, and refuse where the answer is not yes."""
        try:
            answer = input(f"{question} [y/N] ")
        except (EOFError, RuntimeError):  # standard input is closed
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            raise CommandError("Not confirmed, so nothing was changed. A script gives --noinput.")

    def write(self, line: str) -> None:
        """Write a line, escaped, at once: a log collector reads a pipe."""
        self.stdout.write(escaped(line))
        self.stdout.flush()

    def write_json(self, value: Any) -> None:
        """Write a value as JSON, which escapes by itself."""
        self.stdout.write(json.dumps(value, indent=2, default=datetime.isoformat))


def when(moment: datetime, *, using: str) -> str:
    """Return a database's time for people, in the project's zone, as options take it."""
    return f"{timezone.localtime(aware(moment, using=using)):%Y-%m-%d %H:%M:%S}"


def _require_sound(options: dict[str, Any]) -> None:
    """Refuse what is empty, and what no database stores: bytes that are no UTF-8 are surrogates."""
    for name in SELECTING:
        if options.get(name) == "":
            raise InvalidArgument(f"--{name} is empty. Nothing was done.")
    for name, value in options.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and storable(text) != text:
                raise InvalidArgument(
                    f"{name}: {text[:100]!r} is no text that a database can store. Write it in "
                    "valid UTF-8, without NUL."
                )
