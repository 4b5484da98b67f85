"""perdure: federated continual learning.

>>> import perdure
>>> result = perdure.run({"stream": {"tasks": 2}, "train": {"rounds": 2}})
>>> sorted(result.metrics["task_agnostic"])
['ACC', 'AF', 'Avg', 'BWT', 'F', 'FGT', 'FT', 'PD']
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.config import Config
from perdure.errors import PerdureError, RunError, UserError
from perdure.version import __version__

if TYPE_CHECKING:
    from perdure.comparison.compare import compare
    from perdure.runs.model import TrainedModel
    from perdure.runs.model import load_model as load
    from perdure.runs.runner import Result, resume, run

__all__ = [
    "Config",
    "PerdureError",
    "Result",
    "RunError",
    "TrainedModel",
    "UserError",
    "__version__",
    "compare",
    "load",
    "resume",
    "run",
]

_HOMES = {
    "Result": ("perdure.runs.runner", "Result"),
    "TrainedModel": ("perdure.runs.model", "TrainedModel"),
    "compare": ("perdure.comparison.compare", "compare"),
    "load": ("perdure.runs.model", "load_model"),
    "resume": ("perdure.runs.runner", "resume"),
    "run": ("perdure.runs.runner", "run"),
}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: a process that only needs a part starts a second earlier."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
