"""The table of payments. Each row commits together with the fence of its transaction."""

from django.db import models


class Payment(models.Model):
    """Money that was taken for an order of the shop."""

    order = models.CharField(max_length=50, unique=True)
    amount = models.DecimalField(max_digits=10, decimal_places=2)

    def __str__(self):
        return f"{self.order}: {self.amount}"
