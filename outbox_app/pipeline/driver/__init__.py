"""The part of the pipeline that uses Django: options, commands, results in the database."""
