"""The shop's page: the latest orders, and buttons that place an order or reorder articles."""

import random

from django.contrib import messages
from django.shortcuts import redirect, render
from django.views.decorators.http import require_GET, require_POST

from . import services
from .models import Order, OrderProgress, Shelf, Stock

SHOWN = 50


@require_GET
def orders(request):
    """Show the latest orders, the rows that tasks have written for them, and the views."""
    latest = Order.objects.select_related("stock", "payment", "receipt")[:SHOWN]
    progress = OrderProgress.objects.in_bulk([order.pk for order in latest])
    for order in latest:
        order.progress = progress.get(order.pk)
    stock = list(Stock.objects.select_related("sales").order_by("name"))
    shelves = Shelf.objects.in_bulk([str(article.pk) for article in stock])
    for article in stock:
        article.shelf = shelves.get(str(article.pk))
    return render(request, "shop/orders.html", {"orders": latest, "stock": stock})


@require_POST
def place_order(request):
    """Place an order for a random article, as a customer would."""
    stock = random.choice(Stock.objects.all())
    order = services.place_order("visitor@example.com", stock, quantity=random.randint(1, 3))
    messages.success(request, f"Placed: {order}. The tasks follow.")
    return redirect("shop:orders")


@require_POST
def reorder(request):
    """Reorder every article that runs low."""
    count = services.reorder_low_stock()
    messages.success(request, f"Articles ordered anew: {count}.")
    return redirect("shop:orders")
