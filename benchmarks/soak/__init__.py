"""The soak: ``python -m benchmarks soak --minutes 20``.

Real writers, drainers, subscriptions and consumers run on private servers, with random faults from
a seed. At the end the judge compares everything that was committed with everything that was
accepted, handled and executed. See ``docs/howto/work-on-outbox_app.md``.
"""
