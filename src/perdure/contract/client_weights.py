"""The largest weights with which clients may upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perdure.contract.needs import Needs
from perdure.contract.uploads import CollectedUploads, Sum, Upload


@dataclass(frozen=True)
class WeightBounds:
    """The largest weights of the clients of one exchange."""

    cap: float
    """Number of examples beyond which a client's do not count; infinite without a cap."""
    largest: Mapping[int, float]
    """By client, the largest weight of a Sum."""

    def impossible(self, uploads: CollectedUploads, rounding: float) -> str | None:
        """Return a sentence about a field whose total weight no allowed weights add up to.

        Args:
            uploads: A sum of uploads.
            rounding: Error of a total by the format of its numbers.
        """
        most = sum(self.largest[client] for client in uploads.clients)
        for name, weight in uploads.weights.items():
            if not -rounding <= weight <= most * (1 + 1e-6) + rounding:
                return f"{name}: total weight: must be 0 to {most:g}, got {weight:g}"
        return None

    def with_equal_weights(self) -> WeightBounds:
        """Return the bounds of clients that all have weight 1."""
        return WeightBounds(self.cap, dict.fromkeys(self.largest, 1.0))


def max_weight(needs: Needs, examples: float) -> float:
    """Return the largest weight of a Sum of a client that counts with this many examples."""
    return needs.max_client_weight * max(1.0, examples)


def check_weights(upload: Upload, largest: float) -> str | None:
    """Return a sentence about a weight that is too large, or None.

    Args:
        upload: One client's upload.
        largest: The largest weight of a Sum that the client may have.
    """
    for name, weight in _weights(upload):
        if not weight <= largest * (1 + 1e-9):
            return f"{name}: weight: must be at most {largest:g}, got {weight:g}"
    return None


def limit_weights(upload: Upload, largest: float) -> Upload:
    """Return an upload whose explicit weights are at most `largest`."""
    if all(weight <= largest for _, weight in _weights(upload)):
        return upload
    return {
        name: Sum(field.value, min(field.weight, largest))
        if isinstance(field, Sum) and field.weight is not None
        else field
        for name, field in upload.items()
    }


def _weights(upload: Upload) -> Iterable[tuple[str, float]]:
    for name, field in upload.items():
        if isinstance(field, Sum) and field.weight is not None:
            yield name, field.weight
