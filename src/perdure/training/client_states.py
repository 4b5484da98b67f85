"""Conversion of a client's state and private parameters to the one tree that is stored."""

from __future__ import annotations

from typing import Any

from perdure.contract.checks import refuse
from perdure.contract.method import Method
from perdure.contract.states import from_tree, to_tree
from perdure.core.trees import Tensors, Tree

_PRIVATE = "private parameters"
"""Contains a space, so no field of a dataclass can have this name."""


def to_stored_tree(previous: Tree, state: Any, private: Tensors, method: Method) -> Tree:
    """Return the tree to store for a client.

    Args:
        previous: The client's stored tree so far; {} if there is none.
        state: The client's new state. If None, the previous one stays.
        private: The client's private parameters of this task. Those of earlier tasks stay.
        method: The method, whose ClientState `state` must be.

    Raises:
        ContractError: `state` is of another type.
    """
    if state is not None and not isinstance(state, method.ClientState):
        expected = f"a {method.ClientState.__name__} (ClientState) or None"
        refuse("ClientResult.state", f"a {type(state).__name__}", expected)
    private = previous.get(_PRIVATE, {}) | private
    tree = _without_private(previous) if state is None else to_tree(state, "client state")
    return tree | ({_PRIVATE: private} if private else {})


def from_stored_tree(tree: Tree, method: Method) -> tuple[Any, Tensors]:
    """Return a client's state and private parameters; defaults if the tree is empty."""
    state = _without_private(tree)
    state_type = method.ClientState
    if not state:
        return state_type(), tree.get(_PRIVATE, {})
    return from_tree(state_type, state, "client state"), tree.get(_PRIVATE, {})


def _without_private(tree: Tree) -> Tree:
    return {name: value for name, value in tree.items() if name != _PRIVATE}
