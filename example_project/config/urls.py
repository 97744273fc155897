from django.contrib import admin
from django.urls import include, path

admin.site.site_header = admin.site.site_title = "The Corner Shop"
admin.site.index_title = "Behind the counter"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("outside.urls")),
    path("", include("shop.urls")),
]
