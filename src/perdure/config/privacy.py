"""The `privacy` section of a config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from perdure.config.base import ConfigSection
from perdure.config.types import FiniteFloat, Integer, PositiveFloat, PositiveInt, reject_bool


class PrivacyConfig(ConfigSection):
    """What clients hide of what they send (docs/privacy.md says from whom)."""

    secagg: bool = False
    """Secure aggregation: the server learns sums and nothing of a single client."""
    threshold: Annotated[FiniteFloat, Field(gt=0.5, le=1)] = 0.66
    """Secagg: the share of a round's clients that must be left for its sum to be opened."""
    bits: Annotated[Literal[32, 64], BeforeValidator(reject_bool)] = 64
    """Secagg: size of a number in a masked upload. 32 halves the bytes and needs a coarser step."""
    precision: Annotated[Integer, Field(ge=0, le=52)] = 30
    """Secagg: values times weights are rounded to multiples of 2^-precision."""
    at_once: bool = True
    """Secagg: a round without dropouts costs one message. False: always two, and the server cannot
    gain by lying about who dropped out."""
    attempts: PositiveInt = 3
    """Secagg: times that a round is tried, each with other clients, before the run stops."""
    clip: PositiveFloat | None = None
    """Largest norm of a client's upload, over all its fields; larger ones are scaled down."""
    noise: PositiveFloat | None = None
    """Standard deviation of the Gaussian noise on a sum, as a multiple of clip."""
    mode: Literal["central", "local"] = "central"
    """Noise once for the sum (under secagg each client adds its part), or on every upload."""
    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = 1e-5
    """Noise: the delta for which epsilon is given."""
    extra_rounds: bool = True
    """Clip and noise also what is sent in exchanges other than training."""

    @model_validator(mode="after")
    def _noise_needs_a_bound(self) -> PrivacyConfig:
        if self.noise is not None and self.clip is None:
            raise ValueError("clip: must be a number, since there is privacy.noise, got None")
        return self
