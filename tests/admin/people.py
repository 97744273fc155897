"""Users and clients with exactly the given permissions."""

from django.contrib.auth.models import Permission, User
from django.test import Client


def user_with(*permissions, name="ann", staff=True):
    user = User.objects.create_user(name, password="secret", is_staff=staff)
    found = Permission.objects.filter(
        content_type__app_label="django_eventbus", codename__in=permissions
    )
    assert {each.codename for each in found} == set(permissions)
    user.user_permissions.set(found)
    return user


def client_with(*permissions, name="ann", strict=False, staff=True):
    """A client that is logged in; a strict one needs CSRF tokens like a browser."""
    client = Client(enforce_csrf_checks=strict)
    client.force_login(user_with(*permissions, name=name, staff=staff))
    return client
