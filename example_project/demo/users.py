"""Two users of the admin: one with all permissions, one who may only view."""

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission

ADMIN = ("admin", "admin")
VIEWER = ("viewer", "viewer")


def create_users() -> None:
    users = get_user_model().objects
    name, password = ADMIN
    users.create_superuser(name, f"{name}@example.com", password)
    name, password = VIEWER
    viewer = users.create_user(name, f"{name}@example.com", password, is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
