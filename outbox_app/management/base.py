"""What the commands share: a help text that is shown as it was written.

``argparse`` fills a description into one paragraph. These teach with lists and blank lines.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from typing import Any

from django.core.management.base import BaseCommand, CommandParser


class TeachingCommand(BaseCommand):
    """A command whose ``help`` keeps its line breaks, and whose lines are flushed."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Keep the line breaks of the help."""
        return super().create_parser(
            prog_name, subcommand, formatter_class=RawDescriptionHelpFormatter, **kwargs
        )

    def write(self, line: str) -> None:
        """Write a line at once: a log collector reads a pipe."""
        self.stdout.write(line)
        self.stdout.flush()
