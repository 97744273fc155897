from django.db import models


class Note(models.Model):
    """The row that a handler writes."""

    event_id = models.UUIDField()

    def __str__(self) -> str:
        return str(self.event_id)
