"""Runs that were handed in. Each has a folder on the server, which is also the app Flower carries.

The app is thin: it names the functions of the installed package and holds the config. So all
machines run the code that was installed on them, but for a method of the user's own, whose file
travels with the app.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.config import Config, dump, read_saved
from perdure.core.errors import RunError, UserError
from perdure.core.files import write_atomic
from perdure.flower.folders import ServerFolder
from perdure.flower.processes import flwr
from perdure.methods import build
from perdure.runs.trained_model import save_custom_code

CONNECTION = "perdure"
_APP = "perdure.flower.apps"
_LICENSE = "See the licence of perdure (Apache-2.0); a method of your own has your own.\n"


@dataclass(frozen=True)
class Submission:
    """A run that was handed in to a server."""

    path: Path

    @property
    def run(self) -> str:
        """A name that nodes and server know the run by, whatever is restarted."""
        return self.path.name

    @property
    def log(self) -> Path:
        """What the loop had to say: Flower keeps the output of its apps to itself."""
        return self.path / "log.txt"

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How it ended; None: it is not known to have ended."""
        path = self.path / "outcome.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def ended(self, state: str, reason: str = "") -> None:
        """Leave a word on how it ended: done, refused or stopped."""
        values = {"state": state, "reason": reason}
        write_atomic(self.path / "outcome.json", (json.dumps(values) + "\n").encode())


def create_submission(
    folder: ServerFolder, config: Config, out: Path, method_dir: Path | None
) -> Submission:
    """Write the app of a run; nothing is started."""
    path = folder.submissions / uuid.uuid4().hex
    path.mkdir(parents=True)
    app = path / "perdure-run"
    app.mkdir()
    save_custom_code(config, build(config.method, method_dir), app)
    for source in sorted((app / "method").rglob("*.py")) if (app / "method").is_dir() else []:
        target = app / source.relative_to(app / "method")
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
    values = {
        "run": path.name,
        "home": str(path),
        "out": str(out.resolve()),
        "config": dump(config),
    }
    (app / "pyproject.toml").write_text(_project(values), encoding="utf-8")
    (app / "LICENSE").write_text(_LICENSE, encoding="utf-8")
    return Submission(path)


def start(folder: ServerFolder, submission: Submission) -> str:
    """Let Flower start it; the number that Flower gave it."""
    (submission.path / "outcome.json").unlink(missing_ok=True)
    app = str(submission.path / "perdure-run")
    ((good, said),) = flwr([["run", app, CONNECTION, "--format", "json"]], folder.flower)
    try:
        return str(json.loads(said[said.index("{") :])["run-id"])
    except (ValueError, KeyError):
        raise RunError(f"flwr run {'said' if good else 'failed'}: {said}") from None


def unfinished(folder: ServerFolder) -> list[Submission]:
    """Runs to go on with after a restart: neither done nor refused."""
    if not folder.submissions.is_dir():
        return []
    found = [Submission(path) for path in sorted(folder.submissions.iterdir()) if path.is_dir()]
    return [each for each in found if (each.outcome or {}).get("state") not in ("done", "refused")]


def read_run(values: dict[str, Any]) -> tuple[Submission, Config, Path]:
    """What a run's app says: the submission, the config, the run directory."""
    import yaml

    try:
        home, out, text = (str(values[key]) for key in ("home", "out", "config"))
    except KeyError as error:
        raise UserError(f"the app lacks the key {error}") from None
    app = Path(home) / "perdure-run"
    return Submission(Path(home)), read_saved(yaml.safe_load(text), app), Path(out)


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
        f'clientapp = "{_APP}:client"',
        "",
        "[tool.flwr.app.config]",
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    return "\n".join(lines) + "\n"
