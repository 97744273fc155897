from django.urls import path

from outside import views

urlpatterns = [
    path("partner/", views.partner, name="partner"),
    path("payments/", views.switch_payments, name="switch-payments"),
]
