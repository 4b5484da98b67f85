"""FedAvg: federated averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences


@dataclass(frozen=True)
class FedAvg(Method):
    """Federated averaging: local SGD, then the weighted mean of the clients' updates.

    In a round every sampled client trains the global model on its examples of the current task and
    sends its update; the server adds the mean, weighted by numbers of examples. This is what every
    method does whose `exchanges` returns `[Train()]`.

    Reference: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of
    Deep Networks from Decentralized Data, AISTATS 2017.
    """

    title: ClassVar[str] = "FedAvg"
    family: ClassVar[str] = "Baselines"
    idea: ClassVar[str] = "The weighted mean of the models that clients train by local SGD."
    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}), cumulative=True)
