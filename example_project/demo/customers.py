"""Customers: they send the forms of the storefront, as a browser does."""

from __future__ import annotations

import http.cookiejar
import random
import re
import urllib.parse
import urllib.request

from shop.models import Card

NAMES = ("ada", "grace", "edsger", "barbara", "donald", "frances", "tony", "margaret")
DECLINED = 0.1


class Customers:
    """All customers, with one HTTP session."""

    def __init__(self, url: str) -> None:
        self.url = url
        cookies = http.cookiejar.CookieJar()
        self._browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # the shop is on this machine
            urllib.request.HTTPCookieProcessor(cookies),
        )
        page = self._open(url)
        self._token = _found(r'name="csrfmiddlewaretoken" value="(\w+)"', page)[0]
        self._products = _found(r'name="product" value="(\d+)"', page)

    def order(self, *, card: Card | None = None) -> None:
        """Place a random order; one card in ten is declined."""
        self._send(
            "orders/",
            product=random.choice(self._products),
            quantity=random.choice((1, 1, 1, 2, 3)),
            email=f"{random.choice(NAMES)}@example.com",
            card=card or (Card.EMPTY if random.random() < DECLINED else Card.GOOD),
        )

    def break_payments(self) -> None:
        self._send("payments/", payments="break")

    def repair_payments(self) -> None:
        self._send("payments/", payments="repair")

    def _send(self, path: str, **form: object) -> None:
        fields = {"csrfmiddlewaretoken": self._token, **form}
        self._open(f"{self.url}{path}", urllib.parse.urlencode(fields).encode())

    def _open(self, url: str, data: bytes | None = None) -> str:
        with self._browser.open(url, data, timeout=30) as response:
            return str(response.read().decode())


def _found(pattern: str, page: str) -> list[str]:
    found = re.findall(pattern, page)
    if not found:
        raise ValueError(f"the storefront has nothing like {pattern}")
    return found
