"""The troubleshooting page: one section for each check of event_doctor, with its texts."""

import importlib.util
import re
from pathlib import Path

import pytest

from django_eventbus.diagnosis.catalogue import CHECKS

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "howto" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def generator():
    found = importlib.util.spec_from_file_location("troubleshooting", DOCS / "troubleshooting.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_heading_names_a_check_and_every_check_has_a_heading():
    headings = re.findall(r"^##+ (.+)$", PAGE, flags=re.MULTILINE)
    assert headings == [f"{each.id}: {each.title}" for each in CHECKS]


def test_the_table_of_symptoms_has_every_check():
    assert re.findall(r"^\| .+ \| \[(\w+)\]\(#\1\) \|$", PAGE, flags=re.MULTILINE) == [
        each.id for each in CHECKS
    ]


def test_the_page_is_up_to_date(generator):
    assert generator.page(CHECKS) == PAGE, "run: make troubleshooting"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_texts_of_a_check_are_sentences(check):
    assert re.fullmatch(r"EB\d{3}", check.id)
    assert not check.title.endswith(".")
    for text in (check.symptom, check.cause, check.fix):
        assert text.endswith(".")
        assert "  " not in text
        assert "|" not in text  # It would end a cell of the table.
