"""The stream that the subscription ``invoice-mails`` cannot handle.

Apart from the subscriptions: importing those declares them, in the process of the tests too.
"""

POISON = "order-1042"
