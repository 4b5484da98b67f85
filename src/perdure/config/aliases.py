"""Keys of earlier versions: read for one release, with a warning that names the new key."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from perdure.config.train import TrainConfig

log = logging.getLogger(__name__)

RENAMED: dict[str, dict[str, str]] = {
    "privacy": {"extra_rounds": "task_end", "at_once": "single_message"},
    "runs": {"keep": "keep_checkpoints"},
}
"""By section the old and the new name of a key."""
RENAMED_OF_METHODS: dict[str, dict[str, str]] = {
    "fot": {"sampling": "sketch_ratio", "privacy": "sketch_noise", "others": "unprotected"},
    "fedprotip": {"images": "max_examples", "columns": "max_columns"},
    "gpm": {"images": "max_examples", "columns": "max_columns"},
    "pip": {"head": "average_head"},
    "special": {"tune": "auto_lambda"},
    "fedomg": {"rescale": "scale"},
    "stamp": {"rescale": "scale"},
}
"""By kind of method the old and the new name of a hyperparameter."""
MOVED_TO_TRAIN: dict[str, dict[str, str]] = {
    "special": {"global_lr": "server_lr", "schedule": "server_schedule"},
    "fot": {"mu": "server_lr"},
    "fedomg": {"global_lr": "server_lr"},
    "stamp": {"global_lr": "server_lr"},
}
"""By kind of method the hyperparameters that are other names of keys of the train section."""
_SCALE_OF_RESCALE = {"none": "paper"}
_AVERAGE_HEAD = {True: "every_round", False: "task_end"}
_warned: set[str] = set()


def old_method_keys(kind: str) -> set[str]:
    """Return the keys that a method had in earlier versions and that are still read."""
    return {*RENAMED_OF_METHODS.get(kind, {}), *MOVED_TO_TRAIN.get(kind, {})}


def with_new_keys(values: dict[str, Any], warn: bool = True) -> dict[str, Any]:
    """Return the values of a config with the keys of earlier versions renamed.

    Args:
        values: A config as plain values; what is not valid stays, to be refused later.
        warn: Log a warning per key, once per process.

    Raises:
        ValueError: A key is given under both names with different values.
    """
    for section, names in RENAMED.items():
        if isinstance(values.get(section), dict):
            values = {**values, section: _renamed(values[section], names, section, warn)}
    if isinstance(values.get("train"), dict):
        values = {**values, "train": _with_rounds(values["train"], warn)}
    method = values.get("method")
    if not isinstance(method, dict):
        return values
    method = _with_new_hyperparameters(method, "method", warn)
    others = method.get("with")
    if isinstance(others, list):
        renamed = [
            _with_new_hyperparameters(other, f"method.with.{index}", warn)
            for index, other in enumerate(others)
        ]
        method = {**method, "with": renamed}
    return _with_server_step({**values, "method": method})


def _with_new_hyperparameters(method: Any, key: str, warn: bool) -> Any:
    names = RENAMED_OF_METHODS.get(_kind(method), {})
    if not names:
        return method
    return _renamed(_with_new_values(method), names, key, warn)


def _with_new_values(method: dict[str, Any]) -> dict[str, Any]:
    """Return a method whose old keys have the values of the new ones."""
    head, rescale = method.get("head"), method.get("rescale")
    if method["kind"] == "pip" and isinstance(head, bool):
        return {**method, "head": _AVERAGE_HEAD[head]}
    if "rescale" not in method or not isinstance(rescale, str):
        return method
    step = {"eta": 2.0} if method["kind"] == "stamp" else {}  # its default then, for every scale
    return {**step, **method, "rescale": _SCALE_OF_RESCALE.get(rescale, rescale)}


def _kind(method: Any) -> str:
    kind = method.get("kind") if isinstance(method, dict) else None
    return kind if isinstance(kind, str) else ""


def _renamed(
    section: dict[str, Any], names: dict[str, str], prefix: str, warn: bool
) -> dict[str, Any]:
    """Return the section with new names, in its order."""
    for old, new in names.items():
        if old not in section:
            continue
        if section.get(new, section[old]) != section[old]:
            raise _contradiction(f"{prefix}.{old}", section[old], f"{prefix}.{new}", section[new])
        section = {new if key == old else key: value for key, value in section.items()}
        if warn:
            _warn_once(f"{prefix}.{old}", f"is called {prefix}.{new} now; rename it")
    return section


def _warn_once(key: str, sentence: str) -> None:
    if key not in _warned:
        _warned.add(key)
        log.warning("%s: %s", key, sentence)


def _with_rounds(train: dict[str, Any], warn: bool) -> dict[str, Any]:
    """Return the train section with `first_task_rounds` as the first entry of `rounds`."""
    old, new = "first_task_rounds", "rounds"
    first = train.get(old)
    section = {key: value for key, value in train.items() if key != old}
    if first is None:
        return section
    rounds = train.get(new, TrainConfig.model_fields[new].default)
    if not isinstance(rounds, list):
        rounds = [first, rounds]
    elif rounds and rounds[0] != first:
        raise _contradiction(f"train.{old}", first, f"the first of train.{new}", rounds[0])
    if warn:
        _warn_once(f"train.{old}", f"is the first entry of train.{new} now; write {new}: {rounds}")
    return {**section, new: rounds}


def _contradiction(old: str, value: Any, new: str, current: Any) -> ValueError:
    return ValueError(
        f"{old}: must be {current!r} or omitted, since it is another name of {new}, got {value!r}"
    )


def _with_server_step(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with a method's old keys of the server's step as those of `train`."""
    method, train = values["method"], values.get("train")
    others = method.get("with") or []
    moved = dict(train) if isinstance(train, dict) else {} if train is None else None
    if moved is None or not isinstance(others, list):
        return values
    for old, value, new in _server_steps([method, *others]):
        if moved.get(new) not in (None, value):
            raise _contradiction(f"method.{old}", value, f"train.{new}", moved[new])
        moved[new] = value
    if moved == (train or {}):
        return values
    rest = _without_server_step({key: v for key, v in method.items() if key != "with"})
    parts = {"with": [_without_server_step(other) for other in others]} if others else {}
    return {**values, "train": moved, "method": {**rest, **parts}}


def _server_steps(methods: list[Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the old key, its value and the key of `train`."""
    for method in methods:
        for old, new in MOVED_TO_TRAIN.get(_kind(method), {}).items():
            if old in method:
                yield old, method[old], new


def _without_server_step(method: Any) -> Any:
    names = MOVED_TO_TRAIN.get(_kind(method), {})
    return {key: v for key, v in method.items() if key not in names} if names else method
