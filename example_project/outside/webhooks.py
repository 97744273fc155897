"""Signed webhook calls: the shop signs them, the partner verifies them."""

import hashlib
import hmac
import json
import urllib.request

from django.conf import settings

SIGNATURE = "X-Signature"
TIMEOUT = 5

# The partner is on this machine, so no proxy is used.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, message: dict[str, object], *, idempotency_key: str) -> None:
    """Send a signed call. Raises ``urllib.error.URLError`` if the response is not a success."""
    body = json.dumps(message).encode()
    headers = {
        "Content-Type": "application/json",
        "Idempotency-Key": idempotency_key,
        SIGNATURE: signature(body),
    }
    _opener.open(urllib.request.Request(url, body, headers), timeout=TIMEOUT).close()


def is_signed(body: bytes, given: str) -> bool:
    return hmac.compare_digest(signature(body).encode(), given.encode())


def signature(body: bytes) -> str:
    return hmac.new(settings.PARTNER_SECRET.encode(), body, hashlib.sha256).hexdigest()
