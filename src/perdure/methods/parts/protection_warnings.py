"""Warnings about protected layers: nothing is left to learn in, or nothing is protected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NEARLY_FULL = 0.9
"""Fraction of a layer's input space in use above which a run warns."""


def full_layers_warnings(
    method: str, used: Mapping[str, float], threshold: float
) -> dict[str, str]:
    """Return a warning for each layer whose input space is nearly used up.

    Args:
        method: Name of the method.
        used: By weight name the fraction of the layer's input space that is protected.
        threshold: The method's threshold in this task.
    """
    return {
        f"space of {name}": (
            f"{method}: {fraction:.0%} of the input space of {name} is protected, so that the "
            f"layer hardly learns any more (a threshold below {threshold:g} protects less)"
        )
        for name, fraction in used.items()
        if fraction > NEARLY_FULL
    }


def noise_warning(key: str, drowned: Sequence[str]) -> dict[str, str]:
    """Return a warning if nothing but noise was found in the sketches of some layers.

    Args:
        key: The config key that adds the noise.
        drowned: Weight names of the layers.
    """
    if not drowned:
        return {}
    layers = "layer" if len(drowned) == 1 else "layers"
    return {
        "sketch noise": (
            f"{key}: the noise drowns the signal in {layers} {', '.join(drowned)}; nothing is "
            "protected there (less noise or more clients would leave some of it)"
        )
    }
