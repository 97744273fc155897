"""Settings: one dict, every key with a default, read when they are needed."""

import ast
import os
from pathlib import Path

import pytest
from django.test import override_settings

from django_eventbus import conf
from django_eventbus.conf import Settings


def test_every_setting_has_a_default(settings):
    settings.EVENTBUS = {}
    for name in conf.names():
        assert getattr(conf.settings, name) == vars(Settings)[name]


def test_a_project_without_the_setting_has_the_defaults(settings):
    settings.EVENTBUS = {"BATCH_SIZE": 7}
    del settings.EVENTBUS
    assert conf.settings.BATCH_SIZE == 500
    assert conf.configured() == {}


def test_a_key_overrides_only_its_own_default(settings):
    settings.EVENTBUS = {"BATCH_SIZE": 7}
    assert conf.settings.BATCH_SIZE == 7
    assert conf.settings.POLL_INTERVAL == 1.0
    assert conf.configured() == {"BATCH_SIZE": 7}


def test_a_setting_may_be_overridden_with_something_falsy(settings):
    settings.EVENTBUS = {"NOTIFY": False, "SHUTDOWN_TIMEOUT": 0}
    assert conf.settings.NOTIFY is False
    assert conf.settings.SHUTDOWN_TIMEOUT == 0


def test_settings_are_read_live():
    with override_settings(EVENTBUS={"QUEUE": "mail"}):
        assert conf.settings.QUEUE == "mail"
        with override_settings(EVENTBUS={"QUEUE": "orders"}):
            assert conf.settings.QUEUE == "orders"
        assert conf.settings.QUEUE == "mail"
    assert conf.settings.QUEUE == "default"


def test_other_settings_may_change(settings):
    settings.EVENTBUS = {"QUEUE": "mail"}
    assert conf.settings.QUEUE == "mail"
    settings.DEBUG = True
    assert conf.settings.QUEUE == "mail"


@pytest.mark.parametrize("wrong", [None, 5, "QUEUE", ["QUEUE"]])
def test_a_setting_that_is_not_a_dict_leaves_the_defaults(settings, wrong):
    """The system checks report it, and nothing else fails."""
    settings.EVENTBUS = wrong
    assert conf.configured() == {}
    assert conf.settings.QUEUE == "default"


def test_the_names_are_the_upper_case_attributes():
    assert "NAMESPACE" in conf.names()
    assert all(name.isupper() for name in conf.names())
    assert len(conf.names()) == len(set(conf.names()))


def test_every_setting_has_a_type_and_a_description():
    source = Path(conf.__file__).read_text()
    lines = source.splitlines()
    (cls,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    )
    declared = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    assert [node.target.id for node in declared] == conf.names()
    for node in declared:
        assert lines[node.lineno - 2].strip().startswith("#:"), node.target.id


def test_a_producer_is_host_and_process_unless_named(settings):
    settings.EVENTBUS = {}
    host, _, process = conf.settings.producer().rpartition(":")
    assert host
    assert process == str(os.getpid())
    settings.EVENTBUS = {"PRODUCER": "web-1"}
    assert conf.settings.producer() == "web-1"


def test_a_forked_process_has_its_own_producer_name(settings, monkeypatch):
    settings.EVENTBUS = {}
    before = conf.settings.producer()
    monkeypatch.setattr("os.getpid", lambda: 4711)
    assert conf.settings.producer() != before
    assert conf.settings.producer().endswith(":4711")
