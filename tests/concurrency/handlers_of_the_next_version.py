"""The next version of the code: one more handler of a type. Settings import it before the apps."""

from django.db.models.signals import class_prepared

from django_eventbus.registry import subscribe


def _subscribe(sender, **kwargs):
    if sender.__name__ == "Effect":
        subscribe("process.effect", _handle, name="tomorrow")


def _handle(event):
    from tests.shop.models import Effect

    Effect.objects.create(event_id=event.id, handler=event.handler_name, note=str(event.payload))


class_prepared.connect(_subscribe)
