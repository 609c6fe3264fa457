from django.urls import path
from loans import views

urlpatterns = [
    path("lend/<int:book>/", views.lend),
    path("lend-and-fail/<int:book>/", views.lend_and_fail),
    path("read/<int:book>/", views.read),
]
