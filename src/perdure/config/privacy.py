"""The `privacy` section of a config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perdure.config.base import ConfigSection
from perdure.config.types import (
    NOT_BOOL,
    NonNegativeInt,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
)


class PrivacyConfig(ConfigSection):
    """What clients hide of their uploads (docs/privacy.md says from whom).

    Example: `privacy: {secagg: true, clip: 1.0, noise: 0.5}`
    """

    secagg: bool = False
    """Secure aggregation: the server learns sums and nothing of a single client."""
    threshold: Annotated[float, Field(gt=0.5, le=1, allow_inf_nan=False), NOT_BOOL] = 0.66
    """Secagg: fraction of a round's clients that must be left for its sum to be opened."""
    bits: Annotated[Literal[32, 64], NOT_BOOL] = 64
    """Secagg: bits per number of a masked upload. 32 halves the bytes and needs a smaller
    `precision`."""
    precision: Annotated[int, Field(ge=0, le=52), NOT_BOOL] = 30
    """Secagg: values times weights are rounded to multiples of 2^-precision."""
    single_message: bool = True
    """Secagg: a round without dropouts takes one message per client. If false, it always takes two,
    and the server cannot gain by lying about dropouts."""
    attempts: PositiveInt = 3
    """Secagg: attempts at a round before the run stops. No client takes part in two sums of a
    round: another attempt has other clients, or waits for those that are missing."""
    clip: PositiveFloat | None = None
    """Maximum norm of each field of a client's upload; larger ones are scaled down. Fields whose
    bound the method knows have that one instead. If None, uploads are not clipped."""
    noise: PositiveFloat | None = None
    """Standard deviation of the Gaussian noise on a sum, as a multiple of `clip`; with k fields in
    an upload, sqrt(k) times as much on each. If None, no noise."""
    mode: Literal["central", "local"] = "central"
    """Noise once per sum (central; under secagg each client adds a part), or on every upload
    (local)."""
    delta: OpenFraction = 1e-5
    """Noise: the delta of the (epsilon, delta) guarantee."""
    task_end: bool = True
    """Clip and noise also the uploads of exchanges other than training."""
    min_rows: NonNegativeInt | None = None
    """Rows of a task that a client must have to send anything in it, and rows of a class that it
    must have to send anything about the class. Default: 0 in a simulation, 8 on real nodes, whose
    owners may set more or less (`policy.min_rows` of node.yaml); a config can only ask for
    more."""

    @model_validator(mode="after")
    def _noise_needs_a_bound(self) -> PrivacyConfig:
        if self.noise is not None and self.clip is None:
            raise ValueError("clip: must be a number, since privacy.noise is given, got None")
        return self
