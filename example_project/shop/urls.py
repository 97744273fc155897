from django.urls import path

from shop import views

urlpatterns = [
    path("", views.storefront, name="storefront"),
    path("now/", views.now, name="now"),
    path("orders/", views.place_order, name="place-order"),
    path("orders/<int:pk>/", views.order_page, name="order"),
    path("orders/<int:pk>/story/", views.order_story, name="order-story"),
]
