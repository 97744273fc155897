from django.contrib import admin
from django.http import HttpResponse
from django.urls import path

urlpatterns = [
    path("admin/", admin.site.urls),
    # Browsers request this path and would log a 404 as an error.
    path("favicon.ico", lambda request: HttpResponse(status=204)),
]
