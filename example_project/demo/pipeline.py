"""The last part of the demo: the log that the orders have written, on Spark.

It is archived as a Delta table, audited, and summed up by the shop's own pipeline; a report with
pictures is left in the data folder. The archive is opened with a tool that knows nothing of ours.
"""

import subprocess
import sys

from django.conf import settings
from django.core.management import CommandError, call_command

from outbox_app.exceptions import NoSpark
from outbox_app.pipeline.session import require_java

#: What the audit leaves behind to look at.
REPORT = settings.DATA_DIR / "audit.html"
#: Python that opens the archive without outbox_app, in one line.
OPEN = "from deltalake import DeltaTable; print(DeltaTable('{}').count(), 'events')"


class Lines:
    """A file for a command's output, whose lines become lines of the progress."""

    def __init__(self, progress):
        self.progress = progress

    def write(self, text):
        """Say each line."""
        for line in text.splitlines():
            self.progress.say(line)

    def flush(self):
        """Nothing is held back."""


def check_java():
    """Return why Spark cannot run here; empty where it can."""
    try:
        require_java()
    except NoSpark as error:
        return str(error)
    return ""


def look_at_the_log(progress):
    """Archive and audit the log; return whether it is sound."""
    archive = settings.DATA_DIR / "archive"
    lines = Lines(progress)
    progress.say(
        "The log of the orders is archived and audited with Spark; it takes a while to start."
    )
    try:
        call_command(
            "outbox_pipeline", "archive", "--available-now", f"--to={archive}", stdout=lines
        )
        call_command(
            "outbox_pipeline", "audit", f"--archive={archive}", f"--report={REPORT}", stdout=lines
        )
        call_command("sales", f"--archive={archive}", stdout=lines)
        code = OPEN.format(archive)
        opened = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        progress.say(f'python -c "{code}" → {opened.stdout.strip() or opened.stderr.strip()}')
        return opened.returncode == 0
    except CommandError as error:
        progress.say(f"pipeline: {error}")
        return False
