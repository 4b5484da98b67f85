"""Runs that were submitted to a server, and the app that Flower installs for them."""

from __future__ import annotations

import io
import json
import tomllib
import uuid
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.config import Config, dump, read_saved
from perdure.core.documents import yaml_value
from perdure.core.errors import RunError, UserError
from perdure.core.files import sha256, write_atomic
from perdure.deploy.custom_code import save_custom_code
from perdure.federation.admin.folders import ServerFolder
from perdure.federation.admin.processes import CONNECTION, call_flwr
from perdure.federation.messages import BadMessage
from perdure.federation.node.policy import NodePolicy
from perdure.training.settings import complete_config

# ---- Runs that were submitted to a server. Each has a folder, which holds the app for Flower
#
# The app is thin: it names functions of the installed package and holds the config. All machines
# run the code that is installed on them, except for a custom method, whose file is part of the app.

_APP = "perdure.federation.apps"
CLIENT_APP = f"{_APP}:client"
"""What a node executes to serve a request."""
_LICENSE = "See the license of perdure (Apache-2.0); a custom method has its own.\n"


@dataclass(frozen=True)
class Submission:
    """A run that was submitted to a server."""

    path: Path
    """Its folder."""

    @property
    def run_id(self) -> str:
        """The name by which nodes and server know the run, also after restarts."""
        return self.path.name

    @property
    def log(self) -> Path:
        """The log of the loop, since Flower does not show the output of its apps."""
        return self.path / "log.txt"

    @property
    def outcome(self) -> dict[str, Any] | None:
        """State and reason of the end. None if the run has not ended."""
        path = self.path / "outcome.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def record_outcome(self, state: str, reason: str = "") -> None:
        """Store how the run ended."""
        values = {"state": state, "reason": reason}
        write_atomic(self.path / "outcome.json", (json.dumps(values) + "\n").encode())


def create_submission(
    folder: ServerFolder, config: Config, out: Path, method_dir: Path | None
) -> Submission:
    """Write the app of a run, without starting it.

    Its config is complete, so that server and nodes do not choose for themselves.
    """
    path = folder.submissions / uuid.uuid4().hex
    path.mkdir(parents=True)
    app = path / "perdure-run"
    app.mkdir()
    complete, method = complete_config(config, method_dir)
    save_custom_code(config, method, app, method_dir)
    for source in sorted((app / "method").rglob("*.py")) if (app / "method").is_dir() else []:
        target = app / source.relative_to(app / "method")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    values = {
        "run": path.name,
        "home": str(path),
        "out": str(out.resolve()),
        "config": dump(complete),
    }
    (app / "pyproject.toml").write_text(_project(values), encoding="utf-8")
    (app / "LICENSE").write_text(_LICENSE, encoding="utf-8")
    return Submission(path)


def start_submission(folder: ServerFolder, submission: Submission) -> str:
    """Start a submission with Flower, and return Flower's id of the run.

    Raises:
        RunError: Flower did not start it.

    """
    (submission.path / "outcome.json").unlink(missing_ok=True)
    app = str(submission.path / "perdure-run")
    ((_, output),) = call_flwr([["run", app, CONNECTION, "--format", "json"]], folder.flower)
    reply = _reply(output)
    if "run-id" not in reply:
        raise RunError(f"flwr run: {reply.get('error-message', output)}")
    return str(reply["run-id"])


def _reply(output: str) -> dict[str, str]:
    """Return the JSON object in Flower's output, its texts on one line; empty if there is none."""
    try:
        values = json.loads(output[output.index("{") :])
    except ValueError:
        return {}
    return {key: " ".join(str(value).split()) for key, value in values.items()}


def unfinished_submissions(folder: ServerFolder) -> list[Submission]:
    """Return the runs to resume after a restart: neither done nor refused."""
    if not folder.submissions.is_dir():
        return []
    paths = sorted(path for path in folder.submissions.iterdir() if path.is_dir())
    outcomes = {path: Submission(path).outcome or {} for path in paths}
    ended = ("done", "refused")
    return [Submission(p) for p, outcome in outcomes.items() if outcome.get("state") not in ended]


def read_run(values: dict[str, Any]) -> tuple[Submission, Config, Path]:
    """Return the submission, the config and the run directory of a submitted app.

    Raises:
        UserError: A key is missing.

    """
    try:
        home, out, text = (str(values[key]) for key in ("home", "out", "config"))
    except KeyError as error:
        raise UserError(f"the submitted app has no key {error}") from None
    app = Path(home) / "perdure-run"
    return Submission(Path(home)), read_saved(yaml_value(text), app), Path(out)


def _project(values: dict[str, str]) -> str:
    lines = [
        "[project]",
        'name = "perdure-run"',
        'version = "0.1.0"',
        'description = "A run of perdure."',
        'license = { file = "LICENSE" }',
        "dependencies = []",
        "",
        "[tool.flwr.app]",
        'publisher = "perdure"',
        "",
        "[tool.flwr.app.components]",
        f'serverapp = "{_APP}:server"',
        f'clientapp = "{CLIENT_APP}"',
        "",
        "[tool.flwr.app.config]",
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"


# ---- Check the app of a submission on a node, before Flower installs it and executes its code

_PLAIN_FILES = {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT", ".gitignore"}
"""Files of an app that are not executed."""
_MAX_BYTES = 16 << 20
"""Largest size of an app's files together."""


def check_app(content: bytes, policy: NodePolicy) -> None:
    """Refuse an app that would execute anything but perdure and the code that the owner listed.

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
