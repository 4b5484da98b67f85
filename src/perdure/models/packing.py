"""Padded rows without their padding, for layers that see one token at a time.

A text of 8 tokens in rows of 16 is half padding: projections, perceptrons and norms would work on
it for nothing. They get the real tokens of all rows in one list; attention alone, which needs the
rows, gets them back with zeros in the padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perdure.models.forward_pass import ForwardPass

_WORTH_IT = 0.9
"""The share of real tokens below which less work outweighs two copies a block."""


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a batch of rows are; without places: nothing is packed."""

    places: Tensor | None = None
    """int64 [real]: numbers of the real tokens, row after row."""
    rows: int = 0
    length: int = 0

    def pack(self, x: Tensor) -> Tensor:
        """[rows, length, width] to [real, width]."""
        return x if self.places is None else x.flatten(0, 1).index_select(0, self.places)

    def unpack(self, x: Tensor) -> Tensor:
        """[real, width] to [rows, length, width], zero in the padding."""
        if self.places is None:
            return x
        padded = x.new_zeros(self.rows * self.length, x.shape[-1]).index_copy(0, self.places, x)
        return padded.view(self.rows, self.length, -1)


NO_PACKING = Packing()


def make_packing(padding: Tensor | None, fwd: ForwardPass) -> Packing:
    """How a batch with this padding is packed: bool [rows, length], true for padding.

    Stacked clients keep their padding, since recorded steps have fixed shapes; and so does a pass
    whose layer inputs are looked at.
    """
    fixed = fwd.stacked or fwd.under_vmap
    if padding is None or fixed or fwd.layer_inputs is not None or fwd.input_projections:
        return NO_PACKING
    places = (~padding).flatten().nonzero().squeeze(1)
    if len(places) > _WORTH_IT * padding.numel():
        return NO_PACKING
    return Packing(places, *padding.shape)
