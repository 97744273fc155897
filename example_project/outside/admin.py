from django.contrib import admin

from outside.models import Charge, Notice


@admin.register(Charge)
class ChargeAdmin(admin.ModelAdmin):
    list_display = ["reference", "amount", "charged_at"]


@admin.register(Notice)
class NoticeAdmin(admin.ModelAdmin):
    list_display = ["event_type", "order_id", "received_at"]
