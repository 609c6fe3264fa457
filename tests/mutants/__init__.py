"""Seeded bugs: small mistakes in the places where promises live, and the tests that notice them.

``python -m tests.mutants`` plants one bug after another into a copy of the project, runs the tests
that have to fail, and lists the survivors: bugs that no test has noticed. See ``seeded`` for what a
bug is, and docs/howto/work-on-outbox_app.md for how to add one.
"""
