"""FedMedian: the server takes the median of the clients' updates, value by value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from perdure import CollectedUploads, Context, Exchange, Method, Needs, Server, Train
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class FedMedian(Method):
    """A quantile of the clients' updates, value by value; the server sees every update."""

    quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The quantile; 0.5 is the median."""

    paper: ClassVar[str] = "Yin et al., ICML 2018"
    needs: ClassVar[Needs] = Needs(per_client_fields=("update",))

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train as FedAvg does, with another way to combine the updates."""
        return [Train(combine=self.take_quantile, per_client_updates=True)]

    def take_quantile(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return the quantile of each value over the clients."""
        updates = list(uploads.per_client["update"].values())
        return {
            name: torch.stack([update[name] for update in updates]).quantile(self.quantile, dim=0)
            for name in updates[0]
        }
