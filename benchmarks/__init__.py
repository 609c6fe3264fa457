"""Benchmarks: ``python -m benchmarks NAME [--quick] [--json FILE]``.

Machines differ and are shared, so what counts is a ratio between things measured in turns in one
run. Absolute figures are printed beside them and mean nothing elsewhere.

A benchmark is a module with ``run(*, quick, scale=1.0)``, which returns ``ratios`` (medians over at
least five rounds), ``asked`` (``at least 6``, ``at most 0.1`` or ``0``, by the ratios' names),
``rounds`` (the raw figures), and where it likes ``tables``: ``{title: (heads, lines)}``. ``scale``
is a part of the work, for tests that want to see it run.
"""
