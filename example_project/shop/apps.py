from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "shop"

    def ready(self) -> None:
        from django_eventbus import bridge_model

        from shop import timeline  # noqa: F401 - connects its receivers
        from shop.models import Product

        bridge_model(Product, updated="product.changed", fields=["price", "stock"])
