"""A Content Security Policy that lets the storefront load only its own files.

Django 6.0 has the setting ``SECURE_CSP`` for this, but the example also runs on Django 5.2.
"""

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponse

POLICY = "; ".join(
    [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)

GetResponse = Callable[[HttpRequest], HttpResponse]


def strict_content_security_policy(get_response: GetResponse) -> GetResponse:
    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        if not (_is_admin(request) or _is_debug_page(response)):
            response.headers["Content-Security-Policy"] = POLICY
        return response

    return middleware


def _is_admin(request: HttpRequest) -> bool:
    """Return whether the page is in the admin, whose date filters need inline scripts."""
    return bool(request.resolver_match) and request.resolver_match.app_name == "admin"


def _is_debug_page(response: HttpResponse) -> bool:
    """Return whether this is an error page of Django, which needs its inline styles."""
    return settings.DEBUG and response.status_code in (404, 500)
