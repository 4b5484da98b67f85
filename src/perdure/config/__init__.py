"""What a user may say: one class per section, checked, with defaults."""

from perdure.config.schema import *  # noqa: F403
