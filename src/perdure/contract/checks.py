"""How a method that breaks the contract is refused: one sentence, the same on every engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from perdure.core.errors import RunError


class ContractError(RunError):
    """A method broke the contract. The message names the function, the value and the remedy."""


def refuse(where: str, got: object, allowed: str) -> NoReturn:
    """Raise a ContractError; every sentence about the contract has this form."""
    raise ContractError(f"{where}: must be {allowed}, got {got}")


def check_name(where: str, name: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not among the allowed ones, and suggest the closest of them."""
    known = list(allowed)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    refuse(where, repr(name), f"{', '.join(known) or 'nothing'}{hint}")


def check_tensors(where: str, values: Any, allowed: Mapping[str, torch.Size]) -> None:
    """Refuse names that `allowed` lacks, and tensors of another shape than it says."""
    if not isinstance(values, Mapping):
        got = f"a {type(values).__name__}"
        refuse(where, got, "a dict of tensors by parameter name")
    for name, value in values.items():
        if name not in allowed:
            check_name(where, name, allowed)
        if not isinstance(value, Tensor):
            refuse(f"{where}: {name!r}", f"a {type(value).__name__}", "a tensor")
        if value.shape != allowed[name]:
            refuse(f"{where}: {name!r}", f"shape {list(value.shape)}", f"{list(allowed[name])}")
