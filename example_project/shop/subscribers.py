"""The two views of the shop, built from the events of orders.

``OrderProgressView`` is pushed: the process that places an order writes its row right after the
commit, so the customer sees it at once. A row of ``ArticleSalesView`` depends on the streams of
many orders, so only the subscription updates it, a moment later.
"""

from outbox_app.events import Projection

from .models import ArticleSales, OrderProgress


class OrderProgressView(Projection):
    name = "order-progress"
    model = OrderProgress
    types = ["order.*"]
    push = True

    def apply(self, event, row):
        row = row or OrderProgress()
        if event.type == "order.reserved":
            row.reserved = True
        elif event.type == "order.paid":
            row.paid = True
        elif event.type == "order.receipt_sent":
            row.receipt_sent = True
        return row


class ArticleSalesView(Projection):
    name = "article-sales"
    model = ArticleSales
    types = ["order.placed"]

    def key(self, event):
        return event.data["article"]

    def apply(self, event, row):
        row = row or ArticleSales()
        row.sold += event.data["quantity"]
        row.orders += 1
        return row
