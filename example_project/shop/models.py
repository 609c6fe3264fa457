"""Rows of the shop: what is sold, what was ordered, and what the tasks made of it; and two views.

An order's id is a UUID made in Python, so an order that was rolled back can never share its id with
a later one: a job that leaked out of a rollback would name an order that does not exist.
"""

import uuid

from django.db import models
from django.utils import timezone

from outbox_app.entities import Entity, EntityVersion, Rejected, command


class Stock(models.Model):
    """An article. How many of it are on hand is on its shelf, which has its id."""

    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)

    class Meta:
        verbose_name_plural = "stock"

    def __str__(self):
        return self.name


class ShelfVersion(EntityVersion):
    """What shelves were asked, and answered."""


class Shelf(Entity):
    """The pieces of an article that are on hand: many tasks and buyers change it at once."""

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
        """Take what was ordered; a negative number is what has to be ordered anew."""
        self.state["on_hand"] -= pieces

    @command()
    def refill(self, pieces):
        self.state["on_hand"] = max(self.state["on_hand"], pieces)

    @command()
    def sell(self, buyer):
        """Sell one piece at once, as long as there are some; the receipt follows the sale."""
        if not self.state["on_hand"]:
            raise Rejected("There is none left.", code="sold_out")
        self.state["on_hand"] -= 1
        self.stage("example_project.shop.tasks.send_sale_receipt", [f"{self.pk}/{buyer}"])
        return {"left": self.state["on_hand"]}


class Order(models.Model):
    """What a customer asked for. Everything after it happens in tasks."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    customer = models.EmailField()
    stock = models.ForeignKey(Stock, on_delete=models.PROTECT, related_name="orders")
    quantity = models.PositiveIntegerField(default=1)
    total = models.DecimalField(max_digits=10, decimal_places=2)
    placed_at = models.DateTimeField(default=timezone.now, db_index=True)
    #: When its articles were taken from the stock.
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
    """A view: how far an order has come. ``subscribers.OrderProgressView`` makes it of events."""

    #: The order's id, which is the stream of its events.
    order_id = models.UUIDField(primary_key=True)
    reserved = models.BooleanField(default=False)
    paid = models.BooleanField(default=False)
    receipt_sent = models.BooleanField(default=False)
    #: Version of the last event that was applied.
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
    """A view: how many of an article were ordered. ``subscribers.ArticleSalesView`` makes it."""

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
    """The worker's own note that a task has run. One row a run, so a job that ran twice has two."""

    task_id = models.CharField(max_length=255, db_index=True)
    task = models.CharField(max_length=255)
    #: The task's first argument: for most tasks the id of an order, which need not exist.
    subject = models.CharField(max_length=255)
    state = models.CharField(max_length=20)
    noted_at = models.DateTimeField(default=timezone.now)

    def __str__(self):
        return f"{self.task}({self.subject}): {self.state}"
