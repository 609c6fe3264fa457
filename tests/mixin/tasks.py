"""Tasks that the models name. Workers import this module, web processes need not."""

from __future__ import annotations

from celery import shared_task


@shared_task(name="mixin.created")
def created(pk, kind=None):
    return pk


@shared_task(name="mixin.updated", time_limit=7)
def updated(pk):
    return pk


@shared_task(name="mixin.deleted")
def deleted(pk):
    return pk


@shared_task(name="mixin.closed")
def closed(pk):
    return pk
