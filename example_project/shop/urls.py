"""URLs of the shop."""

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.orders, name="orders"),
    path("place/", views.place_order, name="place_order"),
    path("reorder/", views.reorder, name="reorder"),
]
