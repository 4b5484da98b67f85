"""Measure the figures of docs/defaults.md, and write the page.

    python tools/measure.py [SECTION ...] [--jobs N] [--data FOLDER] [--reuse] [--page]

Every section of tools/measured_all.py, or the named ones, is run: many small configs, one
thread each. What is measured goes to docs/measured/SECTION.json, then the page is written. Finished
runs are kept in runs/measure and are not repeated while the code that trains is the same. Sections
that need files (mnist.npz, ...) find them in FOLDER or in the folder that PERDURE_DATA names.
`--reuse` takes finished runs of other code too, `--page` writes the page alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import measured_page
from measured_all import SECTIONS
from measured_sections import Section

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "runs" / "measure"
TRAINING_CODE = ("algebra", "contract", "core", "data", "engines", "methods", "models", "training")
"""Packages on which a figure depends."""


def main() -> None:
    """Measure the named sections and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--data", type=Path, default=os.environ.get("PERDURE_DATA"))
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if unknown := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"SECTION: must be one of {', '.join(SECTIONS)}, got {unknown[0]}")
    for name, section in SECTIONS.items():
        if not given.page and (not given.sections or name in given.sections):
            if lacking := [each for each in section.packages if find_spec(each) is None]:
                print(f"{name}: left out, since {' and '.join(lacking)} are not installed")
                continue
            values = measure(section, given.jobs, given.data, given.reuse)
            measured_page.write_measured(name, values)
    measured_page.write_page()


def measure(section: Section, jobs: int, data: Path | None, reuse: bool) -> dict[str, Any]:
    """Return the runs of a section by label: one entry per seed, with the code that made it."""
    code, runs = code_hash(), []
    for variant in section.variants:
        config = with_data(variant.config, data)
        runs += [(variant, seed, {**config, "seed": seed}) for seed in section.seeds]
    files = [CACHE / f"{config_hash(config)}.json" for _, _, config in runs]
    missing = [
        (config, file)
        for (_, _, config), file in zip(runs, files, strict=True)
        if not is_finished(file, None if reuse else code)
    ]
    run_all(missing, code, jobs)
    by_label: dict[str, Any] = {}
    for (variant, seed, _), file in zip(runs, files, strict=True):
        values = json.loads(file.read_text(encoding="utf-8"))
        by_label.setdefault(variant.label, {})[str(seed)] = values
    return {"seeds": list(section.seeds), "runs": by_label}


def is_finished(file: Path, code: str | None) -> bool:
    """Return whether a run was finished, by this code if it is not None."""
    if not file.is_file():
        return False
    return code is None or json.loads(file.read_text(encoding="utf-8"))["code"] == code


def run_all(missing: Sequence[tuple[dict[str, Any], Path]], code: str, jobs: int) -> None:
    """Run configs in parallel processes, each of them once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    unique = {file: config for config, file in missing}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=one_thread) as pool:
        outcomes = pool.map(run_one, unique.values(), unique, itertools.repeat(code))
        for number, line in enumerate(outcomes, start=1):
            print(f"{number}/{len(unique)} {line}", flush=True)


def one_thread() -> None:
    """Let a process compute with one thread, so that results do not depend on the machine."""
    import torch

    torch.set_num_threads(1)


def run_one(config: dict[str, Any], file: Path, code: str) -> str:
    """Run a config, keep what the page shows of its result, and return a line for the screen."""
    import perdure
    from perdure.core.errors import RunError

    try:
        values = kept(perdure.run(config).values)
    except RunError as error:
        values = {"error": str(error)}
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"code": code, **values}), encoding="utf-8")
    temporary.replace(file)
    shown = values.get("error") or values["metrics"]["task_agnostic"]["ACC"]
    return f"{json.dumps(config['method'])} seed {config['seed']}: {shown}"


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a result."""
    validation = result["validation"]
    return {
        "metrics": result["metrics"],
        "validation": validation and validation["metrics"],
        "bytes_up": result["bytes"]["up"],
        "seconds": result["seconds"]["total"],
    }


def with_data(values: Any, data: Path | None) -> Any:
    """Return config values in which the names of files (`$mnist.npz`) are paths in `data`."""
    if isinstance(values, dict):
        return {key: with_data(value, data) for key, value in values.items()}
    if isinstance(values, list):
        return [with_data(value, data) for value in values]
    if isinstance(values, str) and values.startswith("$"):
        if data is None:
            raise SystemExit(f"--data: must be a folder with {values[1:]}, got nothing")
        return str(Path(data) / values[1:])
    return values


def code_hash() -> str:
    """Return a hash of the code that trains."""
    digest = hashlib.sha256()
    for path in sorted(training_files()):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def training_files() -> Iterator[Path]:
    """Yield the files on which a figure depends."""
    for package in TRAINING_CODE:
        yield from (ROOT / "src" / "perdure" / package).rglob("*.py")


def config_hash(config: dict[str, Any]) -> str:
    """Return a hash of a config."""
    text = json.dumps(config, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


if __name__ == "__main__":
    main()
