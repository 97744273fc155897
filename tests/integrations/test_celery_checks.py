"""System checks of handlers in Celery, and of the project's Celery app."""

import os
import subprocess
import sys
from importlib.util import find_spec
from unittest import mock

import pytest
from celery import Celery, _state
from kombu import Queue
from kombu.connection import Connection

import django_eventbus.tasks  # noqa: F401 - registers the tasks in all apps of this process
from django_eventbus import publish, subscribe
from django_eventbus.checks import check_executors
from django_eventbus.executors import CeleryExecutor, TaskExecutor
from django_eventbus.integrations import celery as integration
from django_eventbus.integrations.celery import forward
from django_eventbus.integrations.celery_executor import DELIVER
from django_eventbus.models import EventLog
from tests.bus import drain

PACKAGE = "django.tasks" if find_spec("django.tasks") else "django_tasks"
DUMMY = f"{PACKAGE}.backends.dummy.DummyBackend"
REDIS = "redis://127.0.0.1:1/0"
RABBITMQ = "amqp://127.0.0.1:1//"
ENDLESS_REDIS = "no broker_pool_acquire_timeout and no broker_transport_options['socket_timeout']."
TIMEOUTS = {"read_timeout": 10, "write_timeout": 10, "socket_timeout": 10}
#: Options of an app that no check complains about.
GOOD = {
    "broker_pool_acquire_timeout": 10,
    "broker_transport_options": {**TIMEOUTS, "confirm_publish": True},
}


def in_celery(name="shop.mail", *, executor="celery", **options):
    return subscribe("order.placed", lambda event: None, name=name, executor=executor, **options)


def all_found():
    """Run the checks. A check that connects to the broker fails its test."""
    error = AssertionError("a check has connected to the broker")
    with mock.patch.object(Connection, "_establish_connection", side_effect=error):
        return check_executors()


def found():
    return {each.id.removeprefix("django_eventbus."): each for each in all_found()}


def the_one_found():
    (message,) = all_found()
    return message


@pytest.fixture
def no_app(monkeypatch):
    """Celery's fallback app is the current one."""
    fallback = Celery("default", fixups=[], set_as_current=False)
    monkeypatch.setattr(_state, "default_app", fallback)
    monkeypatch.setattr(_state._tls, "current_app", None)


@pytest.fixture
def bare_app(use):
    """Return an app without the tasks of the bus, as a project that does not import them."""

    def build(**options):
        app = use(**{"broker": REDIS, **GOOD, **options})
        del app.tasks[DELIVER]
        return app

    return build


# -- executors without Celery


def test_a_handler_in_celery_without_celery_is_an_error(monkeypatch):
    in_celery()
    monkeypatch.setitem(sys.modules, "celery", None)
    message = the_one_found()
    assert message.id == "django_eventbus.E301"
    assert message.is_serious()
    assert "not installed, but it is required by the handler 'shop.mail'." in message.msg
    assert "pip install 'django-durable-events[celery]'" in message.hint


def test_celery_is_not_imported_without_a_handler_that_needs_it(monkeypatch):
    subscribe("order.placed", print, name="local")
    monkeypatch.delitem(sys.modules, "django_eventbus.integrations.celery_setup", raising=False)
    monkeypatch.setitem(sys.modules, "celery", None)
    assert all_found() == []


def test_handlers_in_celery_cannot_share_the_transaction_of_an_event(settings, use):
    use(broker=REDIS, **GOOD)
    in_celery("shop.mail")
    in_celery("shop.bill")
    assert "E302" not in found()
    settings.EVENTBUS = {"ATOMIC": "event"}
    message = found()["E302"]
    assert message.is_serious()
    assert "other processes run the handlers 'shop.mail', 'shop.bill'" in message.msg
    assert "EVENTBUS['ATOMIC'] = 'handler'" in message.hint


@pytest.mark.django_db(transaction=True)
def test_handlers_outside_of_a_transaction_may_run_in_celery_with_atomic_events(
    settings,
    celery,
):
    settings.EVENTBUS = {"ATOMIC": "event"}
    calls = []
    subscribe("order.placed", lambda event: calls.append("local"), name="local")
    subscribe(
        "order.placed",
        lambda event: calls.append("celery"),
        name="outside",
        executor="celery",
        atomic=False,
    )
    assert "E302" not in found()
    publish("order.placed")
    drain()
    assert calls == ["local"]
    celery()
    assert calls == ["local", "celery"]
    assert EventLog.objects.get().status == "COMPLETED"


def test_a_handler_in_a_task_without_the_tasks_framework_is_an_error(monkeypatch):
    subscribe("order.placed", print, name="shop.mail", executor="task")
    assert all_found() == []
    for library in ("django.tasks", "django_tasks"):
        monkeypatch.setitem(sys.modules, library, None)
    message = the_one_found()
    assert message.id == "django_eventbus.E303"
    assert message.is_serious()
    assert "required by the handler 'shop.mail'." in message.msg
    assert "pip install django-tasks" in message.hint


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"queue_name": "mial"}, "Queue 'mial' is not valid"),
        ({"backend": "fast"}, "The connection 'fast' doesn't exist"),
    ],
    ids=["queue", "backend"],
)
def test_an_executor_that_the_setting_tasks_does_not_allow_is_an_error(settings, options, reason):
    settings.TASKS = {"default": {"BACKEND": DUMMY, "QUEUES": ["mail", "default"]}}
    subscribe("order.placed", print, name="right", executor=TaskExecutor(queue_name="mail"))
    assert all_found() == []
    subscribe("order.placed", print, name="wrong", executor=TaskExecutor(**options))
    message = the_one_found()
    assert message.id == "django_eventbus.E304"
    assert message.is_serious()
    assert "TASKS does not allow the executor of the handler 'wrong': " in message.msg
    assert reason in message.msg
    assert message.hint == "TASKS has the backend 'default' with the queues 'default', 'mail'."


# -- the Celery app


@pytest.mark.parametrize("broker", [REDIS, RABBITMQ, "memory://"])
def test_a_good_app_passes(use, broker):
    use(broker=broker, **GOOD, task_acks_late=True)
    in_celery()
    assert all_found() == []


@pytest.mark.usefixtures("no_app")
def test_a_handler_in_celery_without_a_celery_app_is_reported():
    in_celery()
    message = the_one_found()
    assert message.id == "django_eventbus.W301"
    assert not message.is_serious()
    assert "loaded no Celery app, which is required by the handler 'shop.mail'." in message.msg
    assert "from .celery import app" in message.hint


@pytest.mark.usefixtures("no_app")
def test_a_forwarded_event_without_a_celery_app_is_reported():
    forward("order.placed", to="shop.send_receipt")
    assert "the handler 'forward:shop.send_receipt'" in found()["W301"].msg


@pytest.mark.usefixtures("no_app")
def test_events_that_are_handled_by_a_celery_task_need_a_celery_app(settings):
    settings.EVENTBUS = {"CELERY_DRAIN": True}
    assert "required by EVENTBUS['CELERY_DRAIN']." in the_one_found().msg
    in_celery()
    assert "the handler 'shop.mail' and EVENTBUS['CELERY_DRAIN']." in the_one_found().msg


def test_events_that_are_handled_by_a_celery_task_need_the_tasks_of_the_bus(settings, bare_app):
    bare_app()
    settings.EVENTBUS = {"CELERY_DRAIN": True}
    assert "the messages of EVENTBUS['CELERY_DRAIN']." in found()["W302"].msg


def test_events_that_are_handled_by_a_celery_task_need_celery(settings, monkeypatch):
    settings.EVENTBUS = {"CELERY_DRAIN": True}
    monkeypatch.setitem(sys.modules, "celery", None)
    assert "required by EVENTBUS['CELERY_DRAIN']." in found()["E301"].msg


@pytest.mark.usefixtures("no_app")
def test_a_project_that_sends_nothing_to_celery_needs_no_app():
    """The handler of ``delay_durably`` is registered wherever Celery is installed."""
    integration.register()
    assert all_found() == []


def test_an_app_that_does_not_load_the_task_of_the_bus_is_reported(bare_app):
    app = bare_app()
    in_celery()
    message = the_one_found()
    assert message.id == "django_eventbus.W302"
    assert "The Celery app 'tests' does not load the tasks of the bus" in message.msg
    assert "discard the messages of the handler 'shop.mail'." in message.msg
    assert "app.autodiscover_tasks()" in message.hint
    app.autodiscover_tasks(["shop"])
    app.autodiscover_tasks(related_name="jobs")
    Celery("another", set_as_current=False).autodiscover_tasks()
    assert "W302" in found()


@pytest.mark.parametrize(
    "packages", [None, ["shop", "django_eventbus"], lambda: ["django_eventbus"]]
)
def test_an_app_that_will_discover_the_task_passes(bare_app, packages):
    app = bare_app()
    app.autodiscover_tasks(packages)
    in_celery()
    assert all_found() == []
    assert DELIVER not in app.tasks, "a check imports no tasks"


@pytest.mark.parametrize("setting", ["imports", "include"])
def test_an_app_that_imports_the_task_by_a_setting_passes(bare_app, setting):
    bare_app(**{setting: ["django_eventbus.tasks"]})
    in_celery()
    assert all_found() == []


def test_a_forwarded_event_does_not_need_the_task_of_the_bus(bare_app):
    bare_app()
    forward("order.placed", to="shop.send_receipt")
    assert all_found() == []


# -- tasks that the project sends itself


@pytest.mark.parametrize("options", [{}, {"confirm_publish": False}])
def test_rabbitmq_without_confirmations_is_reported(use, options):
    use(broker=RABBITMQ, **{**GOOD, "broker_transport_options": {**TIMEOUTS, **options}})
    in_celery()
    message = the_one_found()
    assert message.id == "django_eventbus.W303"
    assert "tasks that the project sends itself by task.delay()" in message.msg
    assert "The messages of the bus are always confirmed." in message.msg
    assert "{'confirm_publish': True}" in message.hint


@pytest.mark.parametrize(
    ("broker", "options", "missing"),
    [
        (REDIS, {}, ENDLESS_REDIS),
        (REDIS, {"broker_pool_limit": 0}, "no broker_transport_options['socket_timeout']."),
        (REDIS, {"broker_transport_options": TIMEOUTS}, "no broker_pool_acquire_timeout."),
        (
            RABBITMQ,
            {"broker_transport_options": {"confirm_publish": True, "read_timeout": 10}},
            "no broker_pool_acquire_timeout and no broker_transport_options['write_timeout'].",
        ),
    ],
)
def test_calls_without_a_timeout_are_reported(use, broker, options, missing):
    use(broker=broker, **options)
    forward("order.placed", to="shop.send_receipt")
    message = the_one_found()
    assert message.id == "django_eventbus.W304"
    assert f"because the configuration of Celery has {missing}" in message.msg
    assert "The messages of the bus always have timeouts." in message.msg


@pytest.mark.parametrize("broker", [REDIS, RABBITMQ])
def test_calls_of_the_project_are_not_checked_if_it_has_no_tasks(use, broker):
    app = use(broker=broker)
    del app.tasks["shop.send_receipt"]
    in_celery()
    assert all_found() == []


def test_a_module_with_tasks_counts_as_tasks_of_the_project(use, settings, tmp_path, monkeypatch):
    """The module is not imported: its source would raise an error."""
    package = tmp_path / "ck_parcels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ck_parcels"]
    app = use(broker=REDIS)
    del app.tasks["shop.send_receipt"]
    in_celery()
    assert set(found()) == {"W304"}


def test_tasks_that_run_in_the_caller_need_no_options(use):
    use(broker=RABBITMQ, task_always_eager=True)
    in_celery()
    assert all_found() == []


@pytest.mark.parametrize("broker", ["foo://x", "sqs://", "http://["])
def test_an_unknown_broker_is_left_to_celery(use, broker):
    use(broker=broker)
    in_celery()
    assert all_found() == []


# -- Redis delivers messages again


@pytest.mark.parametrize(
    ("options", "timeout", "limit"),
    [({"visibility_timeout": 20}, None, "20"), ({}, 7200, "3600")],
)
def test_a_visibility_timeout_below_the_timeout_of_a_handler_is_reported(
    use,
    options,
    timeout,
    limit,
):
    use(
        broker=REDIS,
        **{**GOOD, "broker_transport_options": {**TIMEOUTS, **options}},
        task_acks_late=True,
    )
    in_celery("shop.mail", timeout=timeout)
    in_celery("shop.quick", timeout=5)
    message = the_one_found()
    assert message.id == "django_eventbus.W305"
    assert f"again after {limit} seconds" in message.msg
    assert f"the handler 'shop.mail' is up to {timeout or 30} seconds" in message.msg
    assert f"to more than {timeout or 30}" in message.hint


@pytest.mark.parametrize(
    ("broker", "changes"),
    [
        (REDIS, {"task_acks_late": False}),
        (REDIS, {"task_always_eager": True}),
        (RABBITMQ, {}),
        (REDIS, {"broker_transport_options": {**TIMEOUTS, "visibility_timeout": 100}}),
    ],
)
def test_a_message_that_is_not_delivered_again_passes(use, broker, changes):
    short = {**TIMEOUTS, "confirm_publish": True, "visibility_timeout": 5}
    use(
        broker=broker,
        **{**GOOD, "task_acks_late": True, "broker_transport_options": short, **changes},
    )
    in_celery(timeout=100)
    assert all_found() == []


def test_timeouts_are_not_compared_while_the_setting_is_invalid(use, settings):
    settings.EVENTBUS = {"HANDLER_TIMEOUT": None}
    use(broker=REDIS, **GOOD, task_acks_late=True)
    in_celery()
    assert all_found() == []


# -- a real project

SETTINGS = """
SECRET_KEY = "only for tests"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django_eventbus", "parcels"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
CELERY_BROKER_URL = "redis://127.0.0.1:1/0"
"""
APP = """
from celery import Celery

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
"""
HANDLERS = """
from django_eventbus import handler


@handler("parcel.sent", executor="celery")
def tell(event): ...
"""


def check(folder):
    """Run ``manage.py check`` and return its output."""
    ended = subprocess.run(
        [sys.executable, "-m", "django", "check", "--tag", "eventbus"],
        cwd=folder,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.processes
def test_the_hints_lead_a_new_project_to_a_working_setup(tmp_path):
    for name in ("project", "parcels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "project" / "settings.py").write_text(SETTINGS)
    (tmp_path / "project" / "celery.py").write_text(APP)
    (tmp_path / "parcels" / "handlers.py").write_text(HANDLERS)
    assert "django_eventbus.W301" in check(tmp_path)
    (tmp_path / "project" / "__init__.py").write_text("from .celery import app as celery_app")
    assert "django_eventbus.W302" in check(tmp_path)
    (tmp_path / "project" / "celery.py").write_text(f"{APP}app.autodiscover_tasks()\n")
    assert "no issues" in check(tmp_path)


# -- queues of Celery


def test_any_queue_is_allowed_if_the_app_declares_none(use):
    use(broker=REDIS, **GOOD)
    in_celery(executor=CeleryExecutor(queue="anything"))
    assert all_found() == []


@pytest.mark.parametrize("queues", [[Queue("celery"), Queue("mail")], {"celery": {}, "mail": {}}])
def test_a_queue_that_the_app_does_not_declare_is_a_warning(use, queues):
    use(broker=REDIS, task_queues=queues, **GOOD)
    in_celery("default")
    in_celery("right", executor=CeleryExecutor(queue="mail"))
    assert all_found() == []
    in_celery("wrong", executor=CeleryExecutor(queue="mial"))
    message = the_one_found()
    assert message.id == "django_eventbus.W306"
    assert not message.is_serious()
    assert "task_queues does not have the queue 'mial' of the handler 'wrong'" in message.msg
    assert "Choose one of the queues 'celery', 'mail'" in message.hint


def test_a_queue_that_celery_would_not_create_is_an_error(use):
    use(broker=REDIS, task_create_missing_queues=False, task_default_queue="celery", **GOOD)
    in_celery("right", executor=CeleryExecutor(queue="celery"))
    assert all_found() == []
    in_celery("wrong", executor=CeleryExecutor(queue="mail"))
    message = the_one_found()
    assert message.id == "django_eventbus.E305"
    assert message.is_serious()
    assert "no message of the handler could be sent" in message.msg
    assert "Choose the queue 'celery', or" in message.hint
