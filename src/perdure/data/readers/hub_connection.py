"""Whether a download can work at all: found out in seconds, without the retries of libraries."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib import import_module
from typing import Any

_SECONDS = 5.0


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Let Hugging Face's libraries use their cache alone while their hub does not answer.

    They would try for half a minute otherwise. Data that was downloaded before is still found.

    Yields:
        Whether the hub answers; False in the offline mode of HF_HUB_OFFLINE.
    """
    constants: Any = import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_reachable(constants.ENDPOINT)
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def is_reachable(url: str) -> bool:
    """Return whether a web server answers within seconds, whatever it answers."""
    try:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "perdure"})
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, HTTPException):
        return False
