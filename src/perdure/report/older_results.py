"""Complete results of earlier versions with what follows from their accuracy matrices."""

from __future__ import annotations

from typing import Any

from perdure.training.metrics import forgetting_by_task, metrics


def with_derived_metrics(result: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a result.json with all metrics and the forgetting after each task.

    Recorded values stay. Nothing is added for a mode whose matrix is missing or incomplete.
    """
    matrices = {mode: matrix for mode, matrix in result["matrix"].items() if _is_complete(matrix)}
    added = {
        mode: metrics(matrix) | (result["metrics"].get(mode) or {})
        for mode, matrix in matrices.items()
    }
    forgetting = {mode: forgetting_by_task(matrix) for mode, matrix in matrices.items()}
    return {
        **result,
        "metrics": {**result["metrics"], **added},
        "forgetting": {**forgetting, **(result.get("forgetting") or {})},
    }


def _is_complete(matrix: Any) -> bool:
    try:
        metrics(matrix)
    except (TypeError, ValueError):
        return False
    return bool(matrix)
