"""Runs of version 0.3 and earlier: the hyperparameters that they lack, and what cannot be resumed.

A run directory keeps all hyperparameters of its method. One that came later is read with the value
by which the run is resumed as it was started. Where no value does that, since the method was
corrected, the run is read as before but not resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from perdure.config.root import Config

Method = dict[str, Any]
"""The section of one method: its kind and its hyperparameters."""

_LATER: dict[str, Method] = {"ewc": {"anchor": "each"}}
"""By kind the hyperparameters that 0.3 did not have, as it trained."""


def is_earlier(values: Any) -> bool:
    """Return whether a saved config is of 0.3 or earlier, which always wrote one key of `train`."""
    train = values.get("train") if isinstance(values, dict) else None
    return isinstance(train, dict) and "first_task_rounds" in train


def with_later_hyperparameters(config: Config) -> Config:
    """Return a config of 0.3 with the hyperparameters that its methods did not have then."""
    method = _completed(config.method)
    others = [_completed(other) for other in method.get("with") or ()]
    method = {**method, "with": others} if others else method
    return config.model_copy(update={"method": method})


def _completed(method: Method) -> Method:
    return {**_LATER.get(method["kind"], {}), **method}


def changed_since(config: Config) -> str | None:
    """Return what a run of 0.3 would do differently today, as a phrase; None if nothing."""
    if config.clients.partition.kind == "classes":
        return "clients hold other classes (clients.partition) than"
    changed = next(_changed_methods(config), None)
    return f"{changed} computes other results than" if changed else None


def _changed_methods(config: Config) -> Iterator[str]:
    for method in (config.method, *(config.method.get("with") or ())):
        condition = _CHANGED.get(method["kind"])
        if condition is not None and condition(config, method):
            yield method["kind"]


def _always(config: Config, method: Method) -> bool:
    return True


def _has_growing_head(config: Config, method: Method) -> bool:
    return config.model.head == "growing"


def _is_quadratic(config: Config, method: Method) -> bool:
    return method.get("head") == "quadratic"


def _has_implicit_step(config: Config, method: Method) -> bool:
    plain = config.train.optimizer.kind == "sgd" and not config.train.momentum
    return method.get("step") == "implicit" and not plain


_CHANGED: dict[str, Callable[[Config, Method], bool]] = {
    "er": _always,
    "stamp": _always,
    "fedprotip": _always,
    "lwf": _has_growing_head,
    "flwf-2t": _has_growing_head,
    "calibrate": _is_quadratic,
    "ewc": _has_implicit_step,
}
"""By kind whether a method of that config computes other results since 0.3."""
