from django.conf import settings
from django.db import models


class Book(models.Model):
    title = models.CharField(max_length=100)


class Loan(models.Model):
    book = models.ForeignKey(Book, on_delete=models.CASCADE)
    member = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    reminded = models.BooleanField(default=False)


class Note(models.Model):
    """What a task has done."""

    text = models.CharField(max_length=200)


class Report(models.Model):
    title = models.CharField(max_length=100)
    pages = models.IntegerField(default=0)
