import pytest


@pytest.fixture
def bridge():
    """Builds bridges that are gone when the test ends."""
    built = []

    def build(make, *args, **options):
        built.append(make(*args, **options))
        return built[-1]

    yield build
    for each in built:
        each.disconnect()
