"""stream.order means something, or is refused with the reason, on every kind of stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_source
from perdure.data.streams import Stream, make_stream
from perdure.data.streams.permuted import permutation


def stream(section: dict[str, Any], **others: Any) -> Stream:
    return make_stream(parse({"stream": section, "data": {"limit": 200}, **others}), Rng(3))


def test_permutations_come_in_the_given_order() -> None:
    ordered = stream({"kind": "permuted", "tasks": 3, "order": [2, 0, 1]})
    plain = stream({"kind": "permuted", "tasks": 3})
    rows = torch.arange(5)
    for task, number in zip(ordered.tasks, [2, 0, 1], strict=True):
        assert torch.equal(task.train.gather(rows), plain.tasks[number].train.gather(rows))
        order = permutation(number, 64, Rng(3))
        pixels = plain.tasks[0].train.gather(rows).flatten(1)
        wanted = pixels if order is None else pixels[:, order]
        assert torch.equal(task.train.gather(rows).flatten(1), wanted)
    assert [task.index for task in ordered.tasks] == [0, 1, 2]
    assert [task.name for task in ordered.tasks] == [
        "permutation 2",
        "as they are",
        "permutation 1",
    ]
    assert len(stream({"kind": "permuted", "order": [1, 4]}).tasks) == 2


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], ["0", "1", "2"]])
def test_an_order_that_is_none_of_permutations(order: list[Any]) -> None:
    with pytest.raises(
        UserError, match=r"^stream.order: must be different numbers of permutations"
    ):
        stream({"kind": "permuted", "tasks": 3, "order": order})


def test_a_pool_has_no_common_order() -> None:
    expected = r"^stream.order: must be null on a pool stream, since every client has its own order"
    with pytest.raises(UserError, match=expected):
        parse({"stream": {"kind": "pool", "order": [1, 0]}})


def test_data_is_read_once_although_its_clients_are_counted_first(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.training.experiment import build_experiment

    reads: list[Any] = []
    read = np.load
    monkeypatch.setattr(
        np, "load", lambda *given, **how: reads.append(given) or read(*given, **how)
    )
    y = np.arange(40) % 4
    np.savez(tmp_path / "d.npz", x=np.random.rand(40, 3), y=y, site=y % 2)
    config = parse(
        {
            "data": {"source": "npz", "path": str(tmp_path / "d.npz")},
            "clients": {"partition": {"kind": "column", "name": "site"}},
            "stream": {"kind": "split", "tasks": 2},
        }
    )
    assert build_experiment(config).config.clients.count == 2
    assert len(reads) == 1
    load_source(config.data, Rng(0))
    assert len(reads) == 2  # nothing is kept after the stream was made
