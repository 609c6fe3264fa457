"""The soak: ``python -m benchmarks soak --minutes 20``.

Real writers, drainers, subscriptions and consumers on private servers, with faults at random from a
seed, and at the end a comparison of everything that was committed with everything that was
accepted, handled and executed. See ``docs/howto/work-on-outbox_app.md``.
"""
