from django.contrib import admin

from shop.models import Order, Product, Shipment


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "stock"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["__str__", "product", "quantity", "email", "card", "status", "placed_at"]
    list_filter = ["status", "card"]
    list_select_related = ["product"]


@admin.register(Shipment)
class ShipmentAdmin(admin.ModelAdmin):
    list_display = ["__str__", "shipped_at"]
    raw_id_fields = ["order"]
