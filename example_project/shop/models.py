"""Tables of the shop: articles, orders, the rows that tasks write, and two views.

An order's id is a UUID made in Python, so an order that was rolled back can never share its id with
a later one: a job that leaked out of a rollback would name an order that does not exist.
"""

import uuid

from django.db import models
from django.utils import timezone

from outbox_app.entities import Entity, EntityVersion, Rejected, command


class Stock(models.Model):
    """An article. The shelf with the article's id says how many pieces are on hand."""

    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)

    class Meta:
        verbose_name_plural = "stock"

    def __str__(self):
        return self.name


class ShelfVersion(EntityVersion):
    """The commands to shelves, and their answers."""


class Shelf(Entity):
    """The pieces of an article on hand. Many tasks and buyers change a shelf at the same time."""

    versions = ShelfVersion
    on_hand = models.IntegerField()

    class Meta:
        verbose_name_plural = "shelves"

    def columns(self):
        return {"on_hand": self.state["on_hand"]}

    @command(creates=True)
    def fill(self, pieces):
        self.state = {"on_hand": pieces}

    @command()
    def take(self, pieces):
        """Take the ordered pieces. A negative ``on_hand`` is the number of missing pieces."""
        self.state["on_hand"] -= pieces

    @command()
    def refill(self, pieces):
        self.state["on_hand"] = max(self.state["on_hand"], pieces)

    @command()
    def sell(self, buyer):
        """Sell one piece, if there is one left; a staged task sends the receipt."""
        if not self.state["on_hand"]:
            raise Rejected("There is none left.", code="sold_out")
        self.state["on_hand"] -= 1
        self.stage("example_project.shop.tasks.send_sale_receipt", [f"{self.pk}/{buyer}"])
        return {"left": self.state["on_hand"]}


class Order(models.Model):
    """An order of a customer. Tasks do all the work that follows it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.EmailField()
    stock = models.ForeignKey(Stock, on_delete=models.PROTECT, related_name="orders")
    quantity = models.PositiveIntegerField(default=1)
    total = models.DecimalField(max_digits=10, decimal_places=2)
    placed_at = models.DateTimeField(default=timezone.now, db_index=True)
    #: When the articles were taken from the shelf.
    reserved_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-placed_at"]

    def __str__(self):
        return f"{self.quantity} x {self.stock} for {self.customer}"


class Payment(models.Model):
    """Money taken for an order, once."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, primary_key=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)
    captured_at = models.DateTimeField(default=timezone.now)

    def __str__(self):
        return f"{self.amount} for order {self.order_id}"


class Receipt(models.Model):
    """The receipt that was sent for an order, once."""

    order = models.OneToOneField(Order, on_delete=models.CASCADE, primary_key=True)
    text = models.TextField()
    sent_at = models.DateTimeField(default=timezone.now)

    def __str__(self):
        return f"receipt for order {self.order_id}"


class OrderProgress(models.Model):
    """A view: the progress of an order. ``subscribers.OrderProgressView`` builds it from events."""

    #: The id of the order, which is also the stream of its events.
    order_id = models.UUIDField(primary_key=True)
    reserved = models.BooleanField(default=False)
    paid = models.BooleanField(default=False)
    receipt_sent = models.BooleanField(default=False)
    #: Version of the last event applied to this row.
    version = models.BigIntegerField(default=0)

    class Meta:
        verbose_name_plural = "order progress"

    def __str__(self):
        steps = {
            "receipt sent": self.receipt_sent,
            "paid": self.paid,
            "reserved": self.reserved,
        }
        return next((step for step, done in steps.items() if done), "placed")


class ArticleSales(models.Model):
    """A view: how many pieces of an article were ordered, by ``subscribers.ArticleSalesView``."""

    stock = models.OneToOneField(
        Stock, on_delete=models.DO_NOTHING, primary_key=True, related_name="sales"
    )
    sold = models.PositiveIntegerField(default=0)
    orders = models.PositiveIntegerField(default=0)

    class Meta:
        verbose_name_plural = "article sales"

    def __str__(self):
        return f"{self.sold} x {self.stock}"


class Execution(models.Model):
    """The worker's own note of one run of a task. A job that ran twice has two rows."""

    task_id = models.CharField(max_length=255, db_index=True)
    task = models.CharField(max_length=255)
    #: The task's first argument: for most tasks the id of an order, which need not exist.
    subject = models.CharField(max_length=255)
    state = models.CharField(max_length=20)
    noted_at = models.DateTimeField(default=timezone.now)

    def __str__(self):
        return f"{self.task}({self.subject}): {self.state}"
