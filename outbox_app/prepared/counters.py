"""The names of the counters of prepared events."""

#: Decided prepared events, by outcome and route, and by the time until the decision, in the
#: buckets of ``delay``.
DECIDED, ROUTE, DECIDE_TIME = "prepared_decided", "route", "prepared_decide_time"

#: All of them.
NAMES = (DECIDED, DECIDE_TIME)
