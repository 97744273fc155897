from django.contrib import admin

from shop.models import DailyReport, Order, PriceChange, Product, Restock, Shipment


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ["name", "price", "stock"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["__str__", "product", "quantity", "total", "email", "card", "status"]
    list_filter = ["status", "card"]
    list_select_related = ["product"]
    ordering = ["-pk"]


@admin.register(Shipment)
class ShipmentAdmin(admin.ModelAdmin):
    list_display = ["__str__", "shipped_at"]
    raw_id_fields = ["order"]
    ordering = ["-pk"]


@admin.register(DailyReport)
class DailyReportAdmin(admin.ModelAdmin):
    list_display = ["day", "orders", "takings"]


@admin.register(PriceChange)
class PriceChangeAdmin(admin.ModelAdmin):
    list_display = ["product", "old", "new", "changed_at"]


@admin.register(Restock)
class RestockAdmin(admin.ModelAdmin):
    list_display = ["product", "quantity", "arrived_at"]
