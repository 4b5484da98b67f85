"""Check the app of a submission on a node, before Flower installs it and executes its code."""

from __future__ import annotations

import io
import tomllib
import zipfile
from typing import Any

from perdure.core.files import sha256
from perdure.flower.node_policy import NodePolicy
from perdure.flower.protocol import BadMessage
from perdure.flower.submission import CLIENT_APP

_PLAIN_FILES = {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT", ".gitignore"}
"""Files of an app that are not executed."""
_MAX_BYTES = 16 << 20
"""Largest size of an app's files together."""


def check_app(content: bytes, policy: NodePolicy) -> None:
    """Refuse an app that would execute anything but perdure and the code that the owner listed.

    Args:
        content: The app as Flower sends it, a zip file.
        policy: The node's policy; `code` lists the SHA-256 of allowed files, or is "any".

    Raises:
        BadMessage: The app has another file, or another entry point.
    """
    if policy.code == "any":
        return
    files = _files(content)
    for name, data in files.items():
        if name not in _PLAIN_FILES and not (name.endswith(".py") and sha256(data) in policy.code):
            raise BadMessage(
                f"policy.code of this node: the SHA-256 of {name!r} must be listed, "
                f"got {sha256(data)}"
            )
    entry, needed = _entry(files.get("pyproject.toml", b""))
    if entry != CLIENT_APP or needed:
        raise BadMessage(
            f"policy.code of this node: the app must start {CLIENT_APP} and install nothing, "
            f"got {entry!r} with {len(needed)} dependencies"
        )


def _files(content: bytes) -> dict[str, bytes]:
    """Return the files of an app by name."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            if sum(member.file_size for member in members) > _MAX_BYTES:
                raise BadMessage(f"the app must have at most {_MAX_BYTES} bytes")
            return {member.filename: archive.read(member) for member in members}
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError, EOFError) as error:
        raise BadMessage(f"the app cannot be read ({error!r})") from None


def _entry(project: bytes) -> tuple[Any, list[Any]]:
    """Return the function that serves requests, and the packages that the app would install."""
    try:
        values = tomllib.loads(project.decode("utf-8"))
        entry = values["tool"]["flwr"]["app"]["components"]["clientapp"]
        return entry, list(values["project"].get("dependencies", []))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessage(f"pyproject.toml of the app cannot be read ({error!r})") from None
