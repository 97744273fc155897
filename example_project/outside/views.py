"""The webhook of the partner, and the switch that stops the payment provider."""

import json

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from outside import webhooks
from outside.models import Notice, PaymentProvider


@csrf_exempt
@require_POST
def partner(request: HttpRequest) -> HttpResponse:
    if not webhooks.is_signed(request.body, request.headers.get(webhooks.SIGNATURE, "")):
        return HttpResponse("not signed by the shop\n", status=403, content_type="text/plain")
    message = json.loads(request.body)
    Notice.objects.get_or_create(
        idempotency_key=request.headers["Idempotency-Key"],
        defaults={"event_type": message["type"], "order_id": message["order_id"]},
    )
    return HttpResponse(status=204)


@require_POST
def switch_payments(request: HttpRequest) -> HttpResponse:
    PaymentProvider.switch(is_down=request.POST.get("payments") == "break")
    return redirect("storefront")
