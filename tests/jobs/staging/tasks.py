"""Bodies of the tasks that the intake's tests send."""

from __future__ import annotations


def add(x, y):
    return x + y


def double(x):
    return 2 * x


def total(numbers):
    return sum(numbers)


def bound(self):
    return self.request.id


def own():
    return None


def anything(*args, **kwargs):
    return args, kwargs
