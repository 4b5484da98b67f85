"""One forward pass: what a model may know besides its parameters and its input."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from perdure.core.trees import Tensors


@dataclass
class ForwardPass:
    """The circumstances of one forward pass, and what it records on its way.

    A model is a pure function of (parameters, input, pass): whatever else it needs comes in here
    and whatever it has to tell besides its output (layer inputs, new running statistics) goes out
    here. Nothing in it is drawn from a global generator, so a pass can be vectorised and repeated.
    """

    train: bool = False
    """Dropout is active."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm, by name."""
    batch_statistics: bool = False
    """Batch norm uses (and records) the statistics of this batch, not the running ones."""
    key: Tensor | None = None
    """int64 scalar from which dropout noise is hashed; None: no dropout."""
    mask: Tensor | None = None
    """float [batch]: 1 for a real row, 0 for padding. None: all rows are real."""
    stacked: bool = False
    """The pass runs under vmap, with one set of weights for each client."""
    under_vmap: bool = False
    """The pass runs under vmap (a lifted one does, too): no shape may depend on values."""
    layer_inputs: Tensors | None = None
    """If a dict, the input of each weight layer is put there, by the name of its weight."""
    updates: Tensors = field(default_factory=dict)
    """New running statistics, by name."""
    input_projections: dict[str, Tensors] = field(default_factory=dict)
    """By the name of a linear layer's weight: a space (algebra.subspaces.Space.tree) of inputs that
    count as zero in the weight's gradient."""
    dropout_calls: int = 0
    """Dropout places passed so far: each hashes noise of its own."""
