"""perdure: federated continual learning.

>>> import perdure
>>> result = perdure.run({"stream": {"tasks": 2}, "train": {"rounds": 2}})
>>> sorted(result.metrics["task_agnostic"])
['ACC', 'AF', 'Avg', 'BWT', 'F', 'FGT', 'FT', 'PD']
"""

from perdure.config import Config
from perdure.errors import PerdureError, RunError, UserError
from perdure.version import __version__

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

from perdure.comparison.compare import compare
from perdure.runs.model import TrainedModel
from perdure.runs.model import load_model as load
from perdure.runs.runner import Result, resume, run
