"""Make docs/combinations.md: which methods combine, derived from their declarations.

Nothing is trained: two methods combine if their needs agree and their exchanges of the first two
tasks can be merged. Written by tools/reference.py.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

from perdure.config import parse
from perdure.contract.exchanges import split_exchanges
from perdure.core.errors import UserError
from perdure.methods.registry import KINDS, build
from perdure.training.experiment import Experiment, build_experiment

_SMALL = {"data": {"limit": 40}, "clients": {"count": 2}, "stream": {"kind": "split", "tasks": 2}}
_MLP = {"kind": "mlp", "hidden": [4]}
_VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
_HEAD = """# Combine methods

A config combines methods by `with`:

```yaml
method: {kind: fedprotip, threshold: 0.95, with: [{kind: special, lambda: 0.1}]}
```

The parts are merged as follows. Exchanges and extra rows are concatenated and penalties are added.
Uploads and adjustments are chained from the first method to the last, transforms of a local step
from the last to the first. Only one part may have a loss, a combination of updates or a prediction.

This page is derived from the methods' declarations by `tools/combinations.py`, without training: it
lists what can run, not what is sensible.

"""


@cache
def _experiment(prompts: bool) -> Experiment:
    """Return a small experiment with two tasks, whose contexts are used."""
    method = {"kind": "fed-dualp"} if prompts else {"kind": "fedavg"}
    model = _VIT if prompts else _MLP
    return build_experiment(parse({**_SMALL, "method": method, "model": model}))


def _prompts(kind: str) -> bool:
    return kind in ("fed-l2p", "fed-dualp", "pip")


def refusal(one: str, other: str) -> str | None:
    """Return why two methods do not combine, or None if they do."""
    experiment = _experiment(_prompts(one) or _prompts(other))
    try:
        method = build({"kind": one, "with": [{"kind": other}]})
        params = experiment.initial_state().server.params
        for task in range(2):
            params = experiment.grow(params, task)
            split_exchanges(method.exchanges(experiment.task_context(task, params)))
    except UserError as error:
        return str(error).removeprefix("method.with: ")
    return None


def page() -> str:
    """Return the page."""
    pairs = list(combinations(KINDS, 2))
    refused = {pair: reason for pair in pairs if (reason := refusal(*pair)) is not None}
    lines = [
        f"Of {len(pairs)} pairs of methods with their default options {len(pairs) - len(refused)} "
        f"combine. These {len(refused)} do not:",
        "",
        "| pair | why |",
        "|---|---|",
        *(f"| `{a}` + `{b}` | {reason} |" for (a, b), reason in refused.items()),
        "",
    ]
    return _HEAD + "\n".join(lines)


if __name__ == "__main__":
    print(page())
