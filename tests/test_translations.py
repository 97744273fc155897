"""The translations of the package. The tools of gettext are not needed here."""

import ast
import gettext
import re
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils import translation
from django.utils.translation.template import templatize

import django_eventbus
from tests.test_dead_letters import dead_letter

PACKAGE = Path(django_eventbus.__file__).parent
LANGUAGES = ("de", "zh_Hans")
#: The number of leading arguments that are texts.
FUNCTIONS = {"_": 1, "gettext": 1, "gettext_lazy": 1, "ngettext": 2, "ngettext_lazy": 2}
PLACEHOLDER = re.compile(r"%\(\w+\)\.?\d?[a-z]")


def texts():
    """Each text of the package, a singular with its plural."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from marked_in(path.read_text())
    for path in sorted(PACKAGE.rglob("*.html")):
        # Django converts the texts of a template into gettext calls.
        for call in re.findall(
            r"""(?:n?gettext|_)\(u?'.*?'[^()]*\)""", templatize(path.read_text())
        ):
            yield from marked_in(call)


def marked_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            count = FUNCTIONS.get(node.func.id, 0)
            found = tuple(ast.literal_eval(each) for each in node.args[:count])
            if found:
                yield found


def test_the_texts_of_code_and_templates_are_found():
    found = set(texts())
    assert ("Retry",) in found  # code
    assert ("Needs attention",) in found  # a template
    assert ("%(count)s item needs attention", "%(count)s items need attention") in found


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated_and_keeps_its_placeholders(language):
    with (PACKAGE / "locale" / language / "LC_MESSAGES" / "django.mo").open("rb") as file:
        catalogue = gettext.GNUTranslations(file)._catalog
    missing, wrong = [], []
    for text, *plural in set(texts()):
        translated = catalogue.get((text, 0) if plural else text)
        if not translated:
            missing.append(text)
        elif placeholders(translated) != placeholders(text):
            wrong.append(translated)
    assert (missing, wrong) == ([], [])


def placeholders(text):
    return sorted(set(PLACEHOLDER.findall(text)))


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("language", "words_of_list", "words_of_overview"),
    [
        ("de", ("Nach Fehler gruppieren", "gescheitert"), ("Übersicht", "Braucht Aufmerksamkeit")),
        ("zh-hans", ("按错误分组", "失败"), ("概览", "需要关注")),
    ],
)
def test_pages_use_the_language_of_the_request(client, language, words_of_list, words_of_overview):
    dead_letter()
    client.force_login(User.objects.create_superuser("chief"))
    for model, words in {"deadevent": words_of_list, "minutestatistics": words_of_overview}.items():
        with translation.override(language):
            page = client.get(reverse(f"admin:django_eventbus_{model}_changelist"))
        for word in words:
            assert word in page.content.decode()
