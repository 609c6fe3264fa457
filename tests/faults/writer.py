"""A writer for tests to kill: it writes a business row and a job in one transaction.

Run ``python -m tests.faults.writer NAME`` with the settings ``tests.faults.project``. The writer
prints ``written`` after both rows, and commits when it gets a line on its standard input.
"""

from __future__ import annotations

import sys

import django
from django.db import transaction


def main(name: str) -> None:
    django.setup()
    from django.contrib.auth.models import Group

    from outbox_app.aliases import outbox_alias
    from tests.faults.project import apps

    using = outbox_alias()
    with transaction.atomic(using=using):
        Group.objects.using(using).create(name=name)
        apps[0].tasks["note"].delay(name, 0)
        print("written", flush=True)
        sys.stdin.readline()
    print("committed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
