"""What all sections of a config have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A part of the config: unknown keys are refused.

    Numbers may be written as text, because YAML reads 1e-3 (without a point) as text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
