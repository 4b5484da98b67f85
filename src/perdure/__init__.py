"""perdure: federated continual learning.

>>> import perdure
>>> result = perdure.run({"stream": {"tasks": 2}, "train": {"rounds": 2}})
>>> sorted(result.metrics["task_agnostic"])
['ACC', 'AF', 'Avg', 'BWT', 'F', 'FGT', 'FT', 'PD', 'learned', 'worst_drop']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.core.errors import PerdureError, RunError, UserError
from perdure.core.version import __version__

if TYPE_CHECKING:
    from perdure.config import Config, StreamConfig
    from perdure.contract import (
        AddToGradient,
        Change,
        Client,
        ClientResult,
        CollectedUploads,
        Context,
        Diagnosis,
        Each,
        Exchange,
        LocalUpdate,
        Method,
        Needs,
        OncePerTask,
        Preferences,
        Prepared,
        ProjectOut,
        Proximal,
        Rows,
        Scalar,
        Server,
        Step,
        Sum,
        Train,
        Transform,
        stacked,
    )
    from perdure.deploy.model_files import load_model as load
    from perdure.deploy.predictions import Prediction
    from perdure.deploy.trained_model import TrainedModel
    from perdure.evaluation.counts import ScoreCounts
    from perdure.evaluation.metrics import Metric
    from perdure.runs.compare.compare import compare
    from perdure.runs.extend import Learner, extend, rewind
    from perdure.runs.result import Result
    from perdure.runs.run import resume, run

__all__ = [
    "AddToGradient",
    "Change",
    "Client",
    "ClientResult",
    "CollectedUploads",
    "Config",
    "Context",
    "Diagnosis",
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
    "Preferences",
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
    "Config": ("perdure.config", "Config"),
    "Learner": ("perdure.runs.extend", "Learner"),
    "Prediction": ("perdure.deploy.predictions", "Prediction"),
    "Result": ("perdure.runs.result", "Result"),
    "TrainedModel": ("perdure.deploy.trained_model", "TrainedModel"),
    "Metric": ("perdure.evaluation.metrics", "Metric"),
    "ScoreCounts": ("perdure.evaluation.counts", "ScoreCounts"),
    "StreamConfig": ("perdure.config", "StreamConfig"),
    "compare": ("perdure.runs.compare.compare", "compare"),
    "extend": ("perdure.runs.extend", "extend"),
    "load": ("perdure.deploy.model_files", "load_model"),
    "resume": ("perdure.runs.run", "resume"),
    "rewind": ("perdure.runs.extend", "rewind"),
    "run": ("perdure.runs.run", "run"),
}
"""All other names are those of perdure.contract."""


def __getattr__(name: str) -> Any:
    """Load a public name when it is used, so that processes that need few names start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("perdure.contract", name))
    return getattr(import_module(module), attribute)
