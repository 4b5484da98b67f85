"""The contract of a method: what methods, engines and the training loop agree on."""

from __future__ import annotations

from perdure.contract.context import Client, ClientData, Context, Server
from perdure.contract.exchanges import Exchange, OncePerTask, Prepared, Train, stacked
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Batch, Rows, Scalar, Step
from perdure.contract.transforms import AddToGradient, ProjectOut, Proximal, Transform
from perdure.contract.uploads import (
    Change,
    ClientResult,
    CollectedUploads,
    Each,
    LocalUpdate,
    Nothing,
    Sum,
)
from perdure.core.errors import ContractError

__all__ = [
    "AddToGradient",
    "Batch",
    "Change",
    "Client",
    "ClientData",
    "ClientResult",
    "CollectedUploads",
    "Context",
    "ContractError",
    "Diagnosis",
    "Each",
    "Exchange",
    "LocalUpdate",
    "Method",
    "Needs",
    "Nothing",
    "OncePerTask",
    "Preferences",
    "Prepared",
    "ProjectOut",
    "Proximal",
    "Rows",
    "Scalar",
    "Server",
    "Step",
    "Sum",
    "Train",
    "Transform",
    "stacked",
]
