from decimal import Decimal

from django.db import migrations

PRODUCTS = [
    ("☕", "Coffee beans", "11.90"),
    ("🫖", "Teapot", "34.00"),
    ("🍯", "Forest honey", "7.50"),
    ("🕯️", "Beeswax candle", "4.20"),
]


def fill_shelves(apps, schema_editor):
    products = apps.get_model("shop", "Product").objects.using(schema_editor.connection.alias)
    for icon, name, price in PRODUCTS:
        products.create(icon=icon, name=name, price=Decimal(price), stock=10_000)


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]

    operations = [migrations.RunPython(fill_shelves, migrations.RunPython.noop)]
