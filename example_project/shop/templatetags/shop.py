from decimal import Decimal

from django import template

register = template.Library()


@register.filter
def euros(amount: Decimal) -> str:
    return f"€{amount:,.2f}"
