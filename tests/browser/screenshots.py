"""The screenshots of the documentation: ``make screenshots``."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.browser.test_pages import urls  # noqa: F401 - a fixture

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOWN = {
    "overview": "overview",
    "dead letters": "dead-letters",
    "groups": "groups",
    "event": "story",
    "confirmation": "confirmation",
}
WHOLE = ("overview", "event")
FILTERS = {"confirmation": "?handler=mail.send&queue=mail"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_take(browse, chief, urls, scheme):  # noqa: F811
    page = browse(chief, urls["app"], color_scheme=scheme, viewport={"width": 1360, "height": 800})
    for name, file in SHOWN.items():
        page.goto(urls[name] + FILTERS.get(name, ""), wait_until="networkidle")
        page.wait_for_function("[...document.images].every(each => each.complete)")
        save(page.screenshot(full_page=name in WHOLE), IMAGES / f"{file}-{scheme}.png")


def save(picture, path):
    """Save with a palette: the pages have few colours, and the file gets three times smaller."""
    path.parent.mkdir(exist_ok=True)
    colours = Image.open(io.BytesIO(picture)).convert("RGB")
    colours.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
