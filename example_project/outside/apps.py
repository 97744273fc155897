from django.apps import AppConfig


class OutsideConfig(AppConfig):
    name = "outside"
    verbose_name = "The world outside"
