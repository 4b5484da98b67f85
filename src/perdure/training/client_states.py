"""A client's state and private parameters as the one tree that is stored for it."""

from __future__ import annotations

from typing import Any

from perdure.contract.checks import refuse
from perdure.contract.method import Method
from perdure.contract.states import from_tree, to_tree
from perdure.core.trees import Tensors, Tree

_PRIVATE = "private parameters"
"""No field of a dataclass can have this name."""


def updated(tree: Tree, state: Any, private: Tensors, method: Method) -> Tree:
    """Return what is stored of a client with a new state (None: the old one) and parameters."""
    if state is not None and not isinstance(state, method.ClientState):
        kind = method.ClientState.__name__
        refuse("ClientResult.state", f"a {type(state).__name__}", f"a {kind} (ClientState) or None")
    before = {name: value for name, value in tree.items() if name != _PRIVATE}
    own = private or tree.get(_PRIVATE, {})
    kept: Tree = before if state is None else to_tree(state, "client state")
    return kept | ({_PRIVATE: own} if own else {})


def read(tree: Tree, method: Method) -> tuple[Any, Tensors]:
    """Return a client's state and private parameters; the state's defaults if none was stored."""
    state = {name: value for name, value in tree.items() if name != _PRIVATE}
    kind = method.ClientState
    return from_tree(kind, state, "client state") if state else kind(), tree.get(_PRIVATE, {})
