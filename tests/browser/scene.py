"""Data for accessibility tests and screenshots: a shop with failed events."""

import random
from datetime import timedelta

from django_eventbus import pauses, publish, publish_many
from django_eventbus.models import DeadEvent, EventLog, EventWorker, MinuteStatistics
from django_eventbus.store import store_for

HANDLERS = {"billing.charge": 40, "stock.reserve": 40, "mail.send": 25, "stock.pack": 30}


def set_the_scene(work):
    """Create failed receipts, declined cards, an hour of statistics and waiting events."""
    publish_many((("mail.receipt", {"order": n}) for n in range(37)), queue="mail")
    for number, card in enumerate(("expired", "stolen", "valid", "expired"), start=1041):
        publish(
            "order.placed",
            {"order": number, "card": card, "total": "59.90", "api_key": "secret"},
            key=f"order:{number}",
        )
    work()
    _spread_over_the_morning()
    _work_for_an_hour()
    orders = ({"order": number, "card": "valid"} for number in range(2000, 2012))
    publish_many((("order.placed", order) for order in orders), key=key_of)
    publish("stock.counted", delay=3600)
    pauses.pause(queue="mail", reason="the mail server is down", by="chief")


def key_of(item):
    return f"order:{item[1]['order']}"


def _spread_over_the_morning():
    now = store_for().read_clock()
    EventLog.objects.update(producer="web-1:4711")
    for ago, letter in enumerate(DeadEvent.objects.filter(type="mail.receipt")):
        moment = now - timedelta(minutes=3 + ago * 7)
        EventLog.objects.filter(pk=letter.pk).update(finished_at=moment)


def _work_for_an_hour():
    now = store_for().read_clock()
    MinuteStatistics.objects.all().delete()
    worker = EventWorker.objects.create(
        namespace="default",
        host="web-1",
        pid=4711,
        queues=["default", "mail"],
        started_at=now - timedelta(hours=9),
        renewed_at=now,
        expires_at=now + timedelta(minutes=1),
    )
    draw = random.Random(7)
    rows = []
    for ago in range(60):
        when = now.replace(second=0, microsecond=0) - timedelta(minutes=ago)
        outage = 20 <= ago <= 28
        for handler, usual in {"": 90, **HANDLERS}.items():
            done = draw.randint(usual // 2, usual)
            slow = draw.randint(0, done // (2 if outage else 12))
            failing = outage and handler in ("", "mail.send")
            rows.append(
                MinuteStatistics(
                    namespace="default",
                    minute=when,
                    worker_id=worker.pk,
                    queue="default",
                    handler=handler,
                    done=done,
                    retried=draw.randint(8, 20) if failing else draw.randint(0, 1),
                    dead=draw.randint(2, 6) if failing else 0,
                    up_to_10ms=done - slow,
                    up_to_300ms=slow,
                )
            )
    MinuteStatistics.objects.bulk_create(rows)
