"""The next version of the code handles one more type. Settings import it before the apps."""

from django.db.models.signals import class_prepared

from django_eventbus.registry import subscribe


def _subscribe(sender, **kwargs):
    if sender.__name__ == "Effect":
        subscribe("fault.of_the_new_version", _handle, name="fault.of_the_new_version")


def _handle(event):
    from tests.shop.models import Effect

    Effect.objects.create(event_id=event.id, handler=event.handler_name)


class_prepared.connect(_subscribe)
