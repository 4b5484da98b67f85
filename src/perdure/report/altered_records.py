"""Records of runs that were changed since the run wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from perdure.core.errors import UserError
from perdure.report.run_records import Runs


@contextmanager
def reading_records(runs: Runs) -> Iterator[None]:
    """Report values of result.json and events.jsonl that no run writes, such as text for numbers.

    Args:
        runs: The runs whose records are read in the block.

    Raises:
        UserError: The block failed by such a value.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        names = ", ".join(str(record.path) for record in runs.records)
        reason = f"{type(error).__name__}: {error}"[:120]
        raise UserError(
            f"{names}: result.json and events.jsonl must be as the run wrote them, got a value of "
            f"another type or size ({reason})"
        ) from error
