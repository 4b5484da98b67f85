"""perdure env: versions and hardware, for bug reports."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from typing import Any

import torch

from perdure.cli.console import facts_table, print_json, stdout_console
from perdure.cli.options import Json
from perdure.core.version import __version__

_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")
_HIDDEN = ("dev",)
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def env(as_json: Json = False) -> None:
    """Print the versions, threads, devices and extras of this installation, for bug reports."""
    facts = environment()
    if as_json:
        print_json(facts)
        return
    stdout_console().print(facts_table(_rows(facts)))


def environment() -> dict[str, Any]:
    """Return the facts about this installation as a JSON document."""
    required, extras = requirements()
    return {
        "perdure": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": {
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": {
            "torch": torch.get_num_threads(),
            **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
        },
        "devices": devices(),
        "packages": versions(required),
        "extras": {extra: versions(names) for extra, names in extras.items()},
    }


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the packages that perdure requires, and those of each extra."""
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in _requirement_lines():
        package, extra = _REQUIREMENT.match(line), _EXTRA.search(line)
        assert package is not None
        if extra is None:
            required.append(package[0])
        elif extra[1] not in _HIDDEN:
            extras.setdefault(extra[1], []).append(package[0])
    return required, extras


def _requirement_lines() -> list[str]:
    try:
        return metadata.requires("perdure") or []
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return ["torch", "numpy"]


def versions(packages: list[str]) -> dict[str, str | None]:
    """Return the version of each package; None if it is not installed."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """Return the devices that torch can use, such as `cpu` and `cuda:0 (NVIDIA A100)`."""
    gpus = range(torch.cuda.device_count())
    names = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in gpus]
    return ["cpu", *names, *(["mps"] if torch.backends.mps.is_available() else [])]


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, threads = facts["cpu"], facts["threads"]
    return [
        ("perdure", facts["perdure"]),
        ("python", facts["python"]),
        ("os", facts["os"]),
        ("cpu", f"{cpu['cores']} cores, {cpu['capability']}"),
        ("threads", ", ".join(f"{name} {value}" for name, value in threads.items())),
        ("devices", ", ".join(facts["devices"])),
        ("packages", _version_text(facts["packages"])),
        *((f"perdure[{extra}]", _version_text(names)) for extra, names in facts["extras"].items()),
    ]


def _version_text(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '(not installed)'}" for name, version in packages.items())
