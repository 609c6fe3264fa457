"""The last part of the demo: Spark works on the log of the orders' events.

Spark archives the log as a Delta table and audits it, and the shop's own pipeline sums it up. The
audit leaves a report with pictures in the data folder. Then deltalake alone opens the archive.
"""

import os
import shutil
import subprocess
import sys

from django.conf import settings
from django.core.management import CommandError, call_command

#: The report of the audit.
REPORT = settings.DATA_DIR / "audit.html"
#: One line of Python that opens the archive without outbox_app.
OPEN = "from deltalake import DeltaTable; print(DeltaTable('{}').count(), 'events')"


class Lines:
    """An output file for commands: each line written to it is shown as a line of the progress."""

    def __init__(self, progress):
        self.progress = progress

    def write(self, text):
        """Say each line."""
        for line in text.splitlines():
            self.progress.say(line)

    def flush(self):
        """Do nothing: write() has shown each line already."""


def check_java():
    """Return why Spark cannot run here, or an empty text if it can."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which(f"{home}/bin/java" if home else "java"):
        return ""
    return "The pipeline needs Java 17 or later: install it, or let JAVA_HOME name one."


def look_at_the_log(progress):
    """Archive and audit the log; return whether each step succeeded."""
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
