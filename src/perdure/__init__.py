"""perdure: federated continual learning.

>>> import perdure
>>> result = perdure.run({"stream": {"tasks": 2}, "train": {"rounds": 2}})
>>> sorted(result.metrics["task_agnostic"])
['ACC', 'AF', 'Avg', 'BWT', 'F', 'FGT', 'FT', 'PD', 'learned', 'worst_drop']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.config import Config, StreamConfig
from perdure.core.errors import PerdureError, RunError, UserError
from perdure.core.version import __version__

if TYPE_CHECKING:
    from perdure.comparison.compare import compare
    from perdure.contract import (
        AddToGradient,
        Change,
        Client,
        ClientResult,
        CollectedUploads,
        Context,
        Each,
        Exchange,
        LocalUpdate,
        Method,
        Metric,
        Needs,
        OncePerTask,
        Prepared,
        ProjectOut,
        Proximal,
        Rows,
        Scalar,
        ScoreCounts,
        Server,
        Step,
        Sum,
        Train,
        Transform,
        stacked,
    )
    from perdure.execution.extension import extend, rewind
    from perdure.execution.learner import Learner
    from perdure.execution.result import Result
    from perdure.execution.runner import resume, run
    from perdure.runs.model_files import load_model as load
    from perdure.runs.predictions import Prediction
    from perdure.runs.trained_model import TrainedModel

__all__ = [
    "AddToGradient",
    "Change",
    "Client",
    "ClientResult",
    "CollectedUploads",
    "Config",
    "Context",
    "Each",
    "Exchange",
    "Learner",
    "LocalUpdate",
    "Method",
    "Metric",
    "Needs",
    "OncePerTask",
    "PerdureError",
    "Prediction",
    "Prepared",
    "ProjectOut",
    "Proximal",
    "Result",
    "Rows",
    "RunError",
    "Scalar",
    "ScoreCounts",
    "Server",
    "Step",
    "StreamConfig",
    "Sum",
    "Train",
    "TrainedModel",
    "Transform",
    "UserError",
    "__version__",
    "compare",
    "extend",
    "load",
    "resume",
    "rewind",
    "run",
    "stacked",
]

_HOMES = {
    "Learner": ("perdure.execution.learner", "Learner"),
    "Prediction": ("perdure.runs.predictions", "Prediction"),
    "Result": ("perdure.execution.result", "Result"),
    "TrainedModel": ("perdure.runs.trained_model", "TrainedModel"),
    "compare": ("perdure.comparison.compare", "compare"),
    "extend": ("perdure.execution.extension", "extend"),
    "load": ("perdure.runs.model_files", "load_model"),
    "resume": ("perdure.execution.runner", "resume"),
    "rewind": ("perdure.execution.extension", "rewind"),
    "run": ("perdure.execution.runner", "run"),
}
"""All other names are those of perdure.contract."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is used, so that processes that need few names start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("perdure.contract", name))
    return getattr(import_module(module), attribute)
