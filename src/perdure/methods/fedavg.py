"""FedAvg: local SGD, then the server takes the weighted mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.contract import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The contract's defaults, unchanged."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
