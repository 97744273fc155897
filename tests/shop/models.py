from django.db import models


class Effect(models.Model):
    """What a handler did, written inside its transaction."""

    event_id = models.UUIDField()
    handler = models.CharField(max_length=100)
    note = models.CharField(max_length=100, default="")

    def __str__(self):
        return f"{self.handler} {self.event_id}"
