"""The shop in the admin. The outbox brings its own pages."""

from django.contrib import admin

from .models import Execution, Order, Payment, Receipt, Stock


@admin.register(Stock)
class StockAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "on_hand"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["id", "customer", "stock", "quantity", "total", "placed_at", "reserved_at"]
    list_select_related = ["stock"]
    list_filter = ["stock"]
    search_fields = ["customer"]
    readonly_fields = ["id"]


@admin.register(Payment)
class PaymentAdmin(admin.ModelAdmin):
    list_display = ["order_id", "amount", "captured_at"]
    raw_id_fields = ["order"]


@admin.register(Receipt)
class ReceiptAdmin(admin.ModelAdmin):
    list_display = ["order_id", "text", "sent_at"]
    raw_id_fields = ["order"]


@admin.register(Execution)
class ExecutionAdmin(admin.ModelAdmin):
    list_display = ["task", "subject", "state", "noted_at", "task_id"]
    list_filter = ["task", "state"]
    search_fields = ["task_id", "subject"]
