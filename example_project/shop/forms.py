from django import forms

from shop.models import Order


class OrderForm(forms.ModelForm):
    quantity = forms.IntegerField(min_value=1, max_value=9, initial=1)

    class Meta:
        model = Order
        fields = ["product", "quantity", "email", "card"]
