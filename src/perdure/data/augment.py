"""Random changes of training images, for a batch or a stack of batches at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perdure.config import CropAugment, DataConfig, FlipAugment

_DRAWS = {"crop": 2, "flip": 1}
"""Random numbers per image of each change."""


@dataclass(frozen=True)
class Augmentation:
    """The changes of `data.augment`, in their order.

    The random numbers are drawn by the caller, so that they depend neither on the engine nor on the
    number of clients that are trained at once.
    """

    changes: tuple[CropAugment | FlipAugment, ...]

    @property
    def draws(self) -> int:
        """Random numbers per image."""
        return sum(_DRAWS[change.kind] for change in self.changes)

    def apply(self, x: Tensor, draws: Tensor, black: Tensor) -> Tensor:
        """Return the changed images.

        Args:
            x: float [..., C, H, W].
            draws: float [..., `self.draws`], uniform in [0, 1).
            black: float [C]: value of a black pixel, which a border has.
        """
        images, numbers = x.flatten(0, -4), draws.to(x.device).flatten(0, -2)
        for change in self.changes:
            count = _DRAWS[change.kind]
            own, numbers = numbers[:, :count], numbers[:, count:]
            if isinstance(change, CropAugment):
                images = crop(images, own, change.padding, black)
            else:
                images = flip(images, own[:, 0], change.probability)
        return images.view(x.shape)


def make_augmentation(config: DataConfig) -> Augmentation | None:
    """Return the changes of a `data` section. None if there are none."""
    return Augmentation(tuple(config.augment)) if config.augment else None


def crop(images: Tensor, draws: Tensor, padding: int, black: Tensor) -> Tensor:
    """Return a window of each image with a border.

    Args:
        images: float [N, C, H, W].
        draws: float [N, 2] in [0, 1): position of the window, vertical and horizontal.
        padding: Width of the border.
        black: float [C]: value of the border.
    """
    count, _, height, width = images.shape
    inside = F.pad(torch.ones_like(images[:1, :1], dtype=torch.bool), (padding,) * 4)
    bordered = torch.where(inside, F.pad(images, (padding,) * 4), black[:, None, None])
    first = (draws * (2 * padding + 1)).long()
    rows = first[:, 0, None] + torch.arange(height, device=images.device)
    columns = first[:, 1, None] + torch.arange(width, device=images.device)
    number = torch.arange(count, device=images.device)[:, None, None]
    chosen = bordered[number, :, rows[:, :, None], columns[:, None, :]]  # [N, H, W, C]
    return chosen.permute(0, 3, 1, 2)


def flip(images: Tensor, draws: Tensor, probability: float) -> Tensor:
    """Return the images [N, C, H, W], mirrored where a draw [N] is below the probability."""
    mirrored = (draws < probability)[:, None, None, None]
    return torch.where(mirrored, images.flip(-1), images)
