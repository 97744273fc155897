from decimal import Decimal

from django.db import migrations

PRODUCTS = [
    ("coffee", "Coffee beans", "11.90", 48),
    ("teapot", "Teapot", "34.00", 26),
    ("honey", "Forest honey", "7.50", 60),
    ("candle", "Beeswax candle", "4.20", 120),
    ("bread", "Sourdough loaf", "5.80", 30),
    ("soap", "Olive soap", "3.60", 75),
]


def fill_shelves(apps, schema_editor):
    products = apps.get_model("shop", "Product").objects.using(schema_editor.connection.alias)
    for picture, name, price, stock in PRODUCTS:
        products.create(
            picture=f"shop/products/{picture}.svg", name=name, price=Decimal(price), stock=stock
        )


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]

    operations = [migrations.RunPython(fill_shelves, migrations.RunPython.noop)]
