"""Spark's parent of Python workers, which has imported what each of them would import once more.

Spark imports nothing before it forks, as a worker's module might start threads; ours and pyarrow
start none. A look at a table forks three workers, and imports are most of what they do.
"""

import importlib
import sys

from pyspark.daemon import manager

if __name__ == "__main__":
    importlib.import_module("pyspark_outbox")
    importlib.import_module("tests.pipeline.shared_types").share()
    importlib.import_module(sys.argv[1] if len(sys.argv) > 1 else "pyspark.worker")
    manager()
