import pytest
from django.db import connection


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings, tmp_path_factory):
    """Let pytest clear away a SQLite file, and what SQLite keeps beside it."""
    if connection.vendor == "sqlite":
        test_settings = connection.settings_dict["TEST"]
        test_settings["NAME"] = tmp_path_factory.mktemp("sqlite") / test_settings["NAME"].name


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup):
    """Let the processes that tests start find the test database."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENTBUS_TEST_DB_NAME", str(connection.settings_dict["NAME"]))
        yield
