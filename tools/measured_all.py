"""The sections of docs/defaults.md in their order."""

from __future__ import annotations

from measured_choices import HEADS, OPTIONS
from measured_pretrained import EFFICIENTNET
from measured_sections import DEFAULTS, Section
from measured_tables import (
    CALIBRATION,
    FIVE,
    ROUTER,
    ROUTER_CIFAR,
    ROUTER_VIT,
    SCHEDULES,
    STAMP,
)

SECTIONS: dict[str, Section] = {
    "five": FIVE,
    "calibration": CALIBRATION,
    "router": ROUTER,
    "router-vit": ROUTER_VIT,
    "router-cifar": ROUTER_CIFAR,
    "efficientnet": EFFICIENTNET,
    "stamp-parts": STAMP,
    "schedules": SCHEDULES,
    "options": OPTIONS,
    "heads": HEADS,
    "defaults": DEFAULTS,
}
