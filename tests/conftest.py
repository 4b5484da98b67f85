"""Settings for all tests."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Machines differ in speed and are shared: no test may fail for being slow.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands set what the library's logger shows; the next test must not notice."""
    logger = logging.getLogger("perdure")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
