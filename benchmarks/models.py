from django.db import models


class Note(models.Model):
    """What a handler writes that writes one row."""

    event_id = models.UUIDField()

    def __str__(self) -> str:
        return str(self.event_id)
