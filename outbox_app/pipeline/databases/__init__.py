"""The databases that Spark reads, in a module for each vendor. See ``pipeline.database``."""
