"""One forward pass: the inputs of a model besides its parameters and its batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from perdure.core.trees import Tensors


@dataclass
class ForwardPass:
    """The circumstances of one forward pass, and the values that it records.

    A model is a pure function of (parameters, batch, forward pass): all its other inputs are fields
    here, and so are its other outputs (layer inputs, new running statistics). No value is drawn
    from a global generator, so a pass can be vectorized and repeated.
    """

    train: bool = False
    """Whether dropout is active."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm, by name."""
    batch_statistics: bool = False
    """Whether batch norm uses (and records) the statistics of this batch, not the running ones."""
    key: Tensor | None = None
    """int64 scalar from which dropout noise is hashed. If None, there is no dropout."""
    mask: Tensor | None = None
    """1 for a real row, 0 for padding, float [batch]. If None, all rows are real."""
    stacked: bool = False
    """Whether the pass runs under vmap with separate weights per client."""
    under_vmap: bool = False
    """Whether the pass runs under vmap, so that no shape may depend on values. Also true if
    `stacked` is."""
    layer_inputs: Tensors | None = None
    """If a dict, the input of each weight layer is stored in it, by the name of its weight."""
    updates: Tensors = field(default_factory=dict)
    """New running statistics, by name."""
    input_projections: dict[str, Tensors] = field(default_factory=dict)
    """Subspaces of inputs that count as zero in the gradient of a linear layer's weight, by the
    weight's name. Each is a result of `Subspace.tree` or `projector` (algebra.subspaces)."""
    dropout_calls: int = 0
    """Calls of dropout so far: each hashes different noise."""
