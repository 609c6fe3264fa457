"""The names of the counters of events."""

#: Handled events and failed attempts of a subscription. The label is its name.
HANDLED, FAILED, SUBSCRIPTION = "handled", "failed", "subscription"
#: The highest position of a log (the label is its table). Readers sample it, not publishers.
NEWEST_POSITION, LOG = "newest_position", "log"

#: All of them.
NAMES = (HANDLED, FAILED, NEWEST_POSITION)
