"""The shop's pages of the admin. The outbox registers its own pages."""

from django.contrib import admin

from .models import ArticleSales, Execution, Order, OrderProgress, Payment, Receipt, Stock


@admin.register(Stock)
class StockAdmin(admin.ModelAdmin):
    list_display = ["name", "price"]


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


class ViewAdmin(admin.ModelAdmin):
    """A read-only page: only the subscription of a view writes its rows."""

    def has_add_permission(self, request):
        return False

    def has_change_permission(self, request, obj=None):
        return False

    def has_delete_permission(self, request, obj=None):
        return False


@admin.register(OrderProgress)
class OrderProgressAdmin(ViewAdmin):
    list_display = ["order_id", "reserved", "paid", "receipt_sent", "version"]
    list_filter = ["reserved", "paid", "receipt_sent"]


@admin.register(ArticleSales)
class ArticleSalesAdmin(ViewAdmin):
    list_display = ["stock", "sold", "orders"]
    list_select_related = ["stock"]


@admin.register(Execution)
class ExecutionAdmin(admin.ModelAdmin):
    list_display = ["task", "subject", "state", "noted_at", "task_id"]
    list_filter = ["task", "state"]
    search_fields = ["task_id", "subject"]
