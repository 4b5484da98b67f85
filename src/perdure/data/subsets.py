"""Random subsets of a source: a test split, and limits on the number of examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perdure.data.source import Array, Source


def stratified_split(y: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Split examples at random into training and test, with the same fraction of every class.

    A class of two examples or more has at least one on either side.

    Args:
        y: Labels, [N].
        fraction: Fraction of the test examples.
        rng: Generator of the draws.

    Returns:
        The positions of the training and of the test examples, both sorted.
    """
    held_out = []
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held_out.append(rows[:count])
    test = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(y)), test, assume_unique=True), test


def limit_train(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """Return the source with at most `limit` random training examples, in their order.

    If `limit` is None, the source is returned unchanged.
    """
    if limit is None or limit >= len(source.train):
        return source
    rows = _random_rows(len(source.train), limit, rng)
    texts = source.texts and ([source.texts[0][i] for i in rows], source.texts[1])
    return replace(source, train=source.train.select(rows), texts=texts)


def limit_test(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """Return the source with at most `limit` random test examples, as `limit_train` does."""
    if limit is None or limit >= len(source.test):
        return source
    rows = _random_rows(len(source.test), limit, rng)
    texts = source.texts and (source.texts[0], [source.texts[1][i] for i in rows])
    return replace(source, test=source.test.select(rows), texts=texts)


def _random_rows(rows: int, limit: int, rng: np.random.Generator) -> Array:
    return np.sort(rng.choice(rows, limit, replace=False))
