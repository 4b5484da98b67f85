"""Remove padding from rows of tokens, for layers that treat every token separately.

A text of 8 tokens in a row of 16 is half padding, on which projections, perceptrons and norms would
waste time. They get the real tokens of all rows in one list; only attention, which needs the rows,
gets them back with zeros in the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perdure.models.forward_pass import ForwardPass

_WORTH_IT = 0.9
"""Fraction of real tokens below which packing is worth its two copies per block."""


@dataclass(frozen=True)
class Packing:
    """The positions of the real tokens in a batch of rows."""

    positions: Tensor | None = None
    """Indices of the real tokens, row after row, int64 [real]. If None, nothing is packed."""
    rows: int = 0
    """Number of rows."""
    length: int = 0
    """Tokens per row."""

    def pack(self, x: Tensor) -> Tensor:
        """Return the real tokens, [real, width], of rows [rows, length, width]."""
        return x if self.positions is None else x.flatten(0, 1).index_select(0, self.positions)

    def unpack(self, x: Tensor) -> Tensor:
        """Return rows [rows, length, width] of real tokens [real, width], zero in the padding."""
        if self.positions is None:
            return x
        padded = x.new_zeros(self.rows * self.length, x.shape[-1]).index_copy(0, self.positions, x)
        return padded.view(self.rows, self.length, -1)


NO_PACKING = Packing()


def make_packing(padding: Tensor | None, fwd: ForwardPass) -> Packing:
    """Return the packing of a batch.

    Stacked clients keep their padding, since traced steps have fixed shapes; so does a pass that
    records or projects layer inputs.

    Args:
        padding: True for padding, bool [rows, length]. If None, there is none.
        fwd: The forward pass.
    """
    has_fixed_shapes = fwd.stacked or fwd.under_vmap
    if padding is None or has_fixed_shapes or fwd.layer_inputs is not None or fwd.input_projections:
        return NO_PACKING
    positions = (~padding).flatten().nonzero().squeeze(1)
    if len(positions) > _WORTH_IT * padding.numel():
        return NO_PACKING
    return Packing(positions, *padding.shape)
