"""Benchmarks: ``python -m benchmarks NAME [--quick] [--json FILE]``.

Machines differ and are shared, so the results are ratios between contestants that are measured in
turns in one run. The absolute figures printed beside them hold for one machine only.

A benchmark is a module with ``run(*, quick, scale=1.0)``, which returns ``ratios`` (medians over at
least five rounds), ``asked`` (the target of each ratio, by its name: ``at least 6``, ``at most
0.1`` or ``0``), ``rounds`` (the raw figures), and optionally ``tables``: ``{title: (heads,
lines)}``. ``scale`` is the fraction of the work to do, for the tests of the benchmarks.
"""
