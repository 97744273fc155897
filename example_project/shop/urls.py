from django.urls import path

from shop import views

urlpatterns = [
    path("", views.storefront, name="storefront"),
    path("order/", views.place_order, name="place-order"),
    path("orders/", views.recent_orders, name="recent-orders"),
]
