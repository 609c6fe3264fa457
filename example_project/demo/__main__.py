"""The command line. Exit code 0: no job was lost or leaked, and each duplicate is explained."""

import argparse
import os
import sys
from contextlib import suppress

import django

from example_project import data_folder, demo
from example_project.processes import interrupt_on_termination


def main():
    """Run the demo; return the argument for ``sys.exit``."""
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description=demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--orders", type=int, default=2000, help="how many are placed (default 2000)"
    )
    parser.add_argument("--writers", type=int, default=4, help="processes that place them (4)")
    parser.add_argument(
        "--buyers", type=int, default=10_000, help="of the flash sale, ten for a piece (10000)"
    )
    parser.add_argument(
        "--pipeline", action="store_true", help="then archive and audit the log with Spark"
    )
    parser.add_argument("--keep", action="store_true", help="keep what an earlier run has left")
    options = parser.parse_args()
    if min(options.orders, options.writers, options.buyers) < 1:
        parser.error("--orders, --writers and --buyers must be at least 1")
    with suppress(OSError):  # Python sets it, and then asks for the place in the file
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    interrupt_on_termination()
    # A short lease, so that another drainer soon takes over the killed drainer's shards.
    os.environ.setdefault("LEASE_SECONDS", "4")
    os.environ.setdefault("RECEIPT_LIMIT", "5")  # so that what the broker loses soon goes again
    django.setup()

    from .run import run

    try:
        with data_folder.in_use():
            if not options.keep:
                data_folder.empty()
            data_folder.make()
            return run(options.orders, options.writers, options.buyers, options.pipeline)
    except data_folder.InUseError as error:
        return f"demo: {error}"
    except KeyboardInterrupt:
        return "demo: interrupted"


if __name__ == "__main__":
    sys.exit(main())
