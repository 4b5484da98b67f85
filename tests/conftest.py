"""Settings for all tests."""

from hypothesis import settings

# Machines differ in speed and are shared: no test may fail for being slow.
settings.register_profile("perdure", deadline=None)
settings.load_profile("perdure")
