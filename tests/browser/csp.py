"""A strict policy where Django has none of its own yet, with its nonce where django-csp has it."""

import secrets


class StrictPolicy:
    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        request.csp_nonce = secrets.token_urlsafe(16)
        response = self.get_response(request)
        allowed = f"'self' 'nonce-{request.csp_nonce}'"
        response["Content-Security-Policy"] = (
            f"default-src 'self'; script-src {allowed}; style-src {allowed}"
        )
        return response
