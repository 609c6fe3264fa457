"""Benchmarks: ``python -m benchmarks NAME [--quick] [--json FILE]``.

Machines differ and are shared, so what counts is a ratio between things measured in turns in one
run. Absolute figures are printed beside them and mean nothing elsewhere.
"""
