"""Arrays that a trained model is given, as rows of its inputs before normalization."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perdure.core.errors import UserError


def model_rows(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return inputs as rows of values, channels first: [N, values].

    Args:
        x: Inputs of the shape [N, *shape]; images may have their channels last, or none.
        shape: Shape of an input of the model.
        dtype: Type of an input of the model. If it is float32, all numbers are accepted.

    Raises:
        UserError: The inputs have another shape or type.
    """
    rows = _finite(x) if dtype == torch.float32 else x
    if rows.dtype != dtype:
        raise UserError(f"input: must be {dtype_name(dtype)}, got {dtype_name(rows.dtype)}")
    return _channels_first(rows, shape).reshape(len(rows), math.prod(shape)).contiguous()


def _channels_first(rows: Tensor, expected: tuple[int, ...]) -> Tensor:
    shape = tuple(rows.shape[1:])
    if shape == expected:
        return rows
    if len(expected) == 3:
        channels, height, width = expected
        if shape == (height, width, channels):
            return rows.permute(0, 3, 1, 2)
        if (1, *shape) == expected:
            return rows
    raise UserError(f"input: must be rows of shape {expected}, got rows of shape {shape}")


def _finite(rows: Tensor) -> Tensor:
    """Return numbers as float32; UserError if one of them is not finite."""
    rows = rows.to(torch.float32)
    if not torch.isfinite(rows).all():
        raise UserError("input: must be finite numbers, got NaN, infinite or too large values")
    return rows


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as float32."""
    return str(dtype).removeprefix("torch.")
