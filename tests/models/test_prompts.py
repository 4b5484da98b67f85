"""Prompts on a frozen backbone: shapes, choices, and features against plain reimplementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perdure.models.backbones import FrozenBackbone
from perdure.models.network import Network, Outputs
from perdure.models.ops import ForwardPass
from perdure.models.prompts import DualPrompts, InputPrompts, Pool, Prompted
from perdure.models.text_encoder import TextEncoder
from perdure.models.transformer import Encoder
from perdure.models.vit import Vit

SMALL = Vit(Encoder(8, 5, 2, 16, pre_norm=True), 1, 8, 4)
WORDS = TextEncoder(Encoder(8, 5, 2, 16, pre_norm=False), 20, 12)
DUAL, INPUT = DualPrompts(slots=4, length=3), InputPrompts(slots=4, length=2, top=2)


def prompted(pool: Pool, backbone: Vit | TextEncoder = SMALL) -> Prompted:
    return Prompted(FrozenBackbone(backbone, backbone.frozen()), pool)


def images(count: int = 5) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(7))


def texts() -> Tensor:
    return torch.tensor([[1, 5, 6, 7, 2, 0], [1, 9, 2, 0, 0, 0], [1, 4, 4, 8, 3, 2]])


def start(body: Prompted) -> dict[str, Tensor]:
    return body.init(torch.Generator().manual_seed(3))[0]


@pytest.mark.parametrize(
    ("pool", "count"), [(DualPrompts(), 330_340), (InputPrompts(), 122_980)], ids=["dualp", "l2p"]
)
def test_vit_b_has_the_papers_number_of_parameters(pool: Pool, count: int) -> None:
    """0.33M (Table 1) and 0.49 MB (Table 7) for 100 classes. No weights are needed for it."""
    vit_b = Vit(Encoder(768, 12, 12, 3072, pre_norm=True), 3, 224, 16)
    network = Network(Prompted(FrozenBackbone(vit_b, {}), pool), Outputs("shared", 100, ((0,),)))
    params, buffers = network.init(torch.Generator())
    assert sum(value.numel() for value in params.values()) == count
    assert not buffers
    prompts = {name: value for name, value in params.items() if name.startswith("prompt.")}
    assert all(-1 <= value.min() < -0.99 and 0.99 < value.max() <= 1 for value in prompts.values())


def test_the_query_is_the_feature_without_prompts_and_has_no_gradient() -> None:
    body = prompted(DUAL)
    query = body.query(images(), ForwardPass())
    torch.testing.assert_close(query, SMALL.features(SMALL.frozen(), images(), ForwardPass()))
    assert not query.requires_grad
    other = torch.ones(5, 8)
    assert body.with_cached_features(other).query(images(), ForwardPass()) is other


def test_similarity_is_the_cosine() -> None:
    body = prompted(DUAL)
    params, query = start(body), body.query(images(), ForwardPass())
    computed = body.similarity(params, images(), ForwardPass())
    for row in range(5):
        for slot in range(4):
            key = params["prompt.keys"][slot]
            cosine = (query[row] @ key) / (query[row].norm() * key.norm())
            torch.testing.assert_close(computed[row, slot], cosine)


@pytest.mark.parametrize("backbone", [SMALL, WORDS], ids=["vit", "text"])
def test_dual_prompts_are_prefixes_of_the_blocks_they_name(backbone: Vit | TextEncoder) -> None:
    body = prompted(DUAL, backbone)
    params, x = start(body), images() if backbone is SMALL else texts()
    slots, weights = torch.arange(len(x)) % 4, backbone.frozen()
    computed = body.features_with(params, x, torch.eye(4)[slots], ForwardPass())
    for row, slot in enumerate(slots.tolist()):  # each row for itself, its prefixes written down
        one = x[row : row + 1]
        each = [*params["prompt.general"], *params["prompt.pool"][slot]]
        prefixes = {n: torch.cat([keys, values], 1)[None] for n, (keys, values) in enumerate(each)}
        padding = backbone.padding(one)
        tokens = backbone.embed(weights, one, ForwardPass())
        hidden = backbone.encoder(weights, tokens, ForwardPass(), prefixes, padding)
        torch.testing.assert_close(computed[row], backbone.pool(hidden, padding)[0])


@pytest.mark.parametrize("backbone", [SMALL, WORDS], ids=["vit", "text"])
def test_a_projected_prefix_of_a_blocks_own_tokens_changes_nothing(
    backbone: Vit | TextEncoder,
) -> None:
    """Every key and value twice: W^K and W^V are applied to a prefix as to the tokens."""
    weights, x = backbone.frozen(), images() if backbone is SMALL else texts()[2:]
    frozen, encoder = FrozenBackbone(backbone, weights), backbone.encoder
    tokens = backbone.embed(weights, x, ForwardPass())
    own = encoder.norm(weights, tokens, "block0.norm1") if encoder.pre_norm else tokens
    prefix = {0: frozen.project(0, torch.cat([own, own], -1))}
    plain = frozen.features(x, {}, ForwardPass())
    torch.testing.assert_close(frozen.features(x, prefix, ForwardPass()), plain)
    other = {0: torch.cat([own, own], -1)}
    assert not torch.allclose(frozen.features(x, other, ForwardPass()), plain)


def test_projected_prompts_are_multiplied_in_every_block() -> None:
    """PIP's eqs. 3 and 4, with the products by numpy."""
    after, before = prompted(DUAL), prompted(replace(DUAL, projected=True))
    params, slot = start(after), torch.eye(4)[1]
    changed = {name: value.clone() for name, value in params.items()}
    for n in range(5):
        prompt = changed["prompt.general"][n] if n < 2 else changed["prompt.pool"][1][n - 2]
        matrix, bias = (
            SMALL.frozen()[f"block{n}.qkv.{part}"].numpy() for part in ("weight", "bias")
        )
        for half, rows in enumerate((slice(8, 16), slice(16, 24))):
            product = prompt[half].numpy() @ matrix[rows].T + bias[rows]
            prompt[half] = torch.from_numpy(product)
    computed = before.features_with(params, images(), slot, ForwardPass())
    expected = after.features_with(changed, images(), slot, ForwardPass())
    torch.testing.assert_close(computed, expected)
    assert not torch.allclose(computed, after.features_with(params, images(), slot, ForwardPass()))


def test_one_slot_for_all_rows_equals_that_slot_for_each() -> None:
    body = prompted(DUAL)
    params, slot = start(body), torch.eye(4)[2]
    each = body.features_with(params, images(), slot.expand(5, 4), ForwardPass())
    torch.testing.assert_close(body.features_with(params, images(), slot, ForwardPass()), each)


@pytest.mark.parametrize("backbone", [SMALL, WORDS], ids=["vit", "text"])
def test_input_prompts_are_tokens_and_their_mean_is_the_feature(
    backbone: Vit | TextEncoder,
) -> None:
    body = prompted(INPUT, backbone)
    params, x = start(body), images() if backbone is SMALL else texts()
    similarity, weights = body.similarity(params, x, ForwardPass()), backbone.frozen()
    computed = body.features(params, x, ForwardPass())
    for row in range(len(x)):
        best = similarity[row].argsort(descending=True)[:2]
        more = torch.cat([params["prompt.pool"][slot] for slot in best])[None]
        one = x[row : row + 1]
        tokens = backbone.embed(weights, one, ForwardPass())
        if backbone is WORDS:  # a text without what fills its row up
            tokens = tokens[:, : int((one != 0).sum())]
        hidden = backbone.encoder(weights, torch.cat([more, tokens], 1), ForwardPass())
        torch.testing.assert_close(computed[row], hidden[0, :4].mean(0), rtol=1e-4, atol=1e-5)


def test_the_nearest_key_chooses_the_expert_row_by_row() -> None:
    body = prompted(DUAL)
    params = start(body)
    queries = body.query(images(), ForwardPass())
    params["prompt.keys"][1], params["prompt.keys"][2] = queries[3], queries[0]
    choice = DUAL.choose(body.similarity(params, images(), ForwardPass()))
    assert choice[3].tolist() == [0, 1, 0, 0]
    assert choice[0].tolist() == [0, 0, 1, 0]
    together = body.features(params, images(), ForwardPass())
    alone = torch.cat([body.features(params, one[None], ForwardPass()) for one in images()])
    torch.testing.assert_close(together, alone)


def test_a_new_task_copies_the_previous_expert_but_not_its_key() -> None:
    params = start(prompted(DUAL))
    after = DUAL.start_task(params, 2)
    assert torch.equal(after["prompt.pool"][2], params["prompt.pool"][1])
    assert torch.equal(after["prompt.keys"], params["prompt.keys"])
    unchanged = [0, 1, 3]
    assert torch.equal(after["prompt.pool"][unchanged], params["prompt.pool"][unchanged])
    assert not torch.equal(params["prompt.pool"][2], params["prompt.pool"][1])  # not in place
    assert DUAL.start_task(params, 0) is params
    assert INPUT.start_task(params, 2) is params


def test_the_pool_of_experts_grows_with_the_tasks_and_keeps_its_experts() -> None:
    params, rng = start(prompted(DUAL)), torch.Generator().manual_seed(4)
    assert DUAL.grow(params, 3, rng) is params
    after = DUAL.grow(params, 5, rng)
    for name in ("prompt.pool", "prompt.keys"):
        assert len(after[name]) == 6
        assert torch.equal(after[name][:4], params[name])
        assert not torch.equal(after[name][4], after[name][5])
    assert torch.equal(after["prompt.general"], params["prompt.general"])
    assert DUAL.choose(torch.zeros(2, 6)).shape == (2, 6)
    assert INPUT.grow(params, 5, rng) is params


def test_a_new_expert_is_drawn_like_the_first_ones_from_the_given_generator() -> None:
    body = prompted(DUAL)
    params = start(body)
    one, same, other = (
        body.prompts.grow(params, 4, torch.Generator().manual_seed(n)) for n in (1, 1, 2)
    )
    for name in ("prompt.pool", "prompt.keys"):
        new = one[name][4]
        assert -1 <= new.min() < -0.3 < 0.3 < new.max() <= 1
        assert torch.equal(one[name], same[name])
        assert not torch.isclose(new, other[name][4]).any()


def test_the_nearest_key_matters_only_if_the_task_is_not_given() -> None:
    similarity = torch.tensor([[0.1, 0.2, 0.9, 0.3], [0.8, 0.2, 0.1, 0.3]])
    slot = torch.eye(4)[1]
    assert DUAL.choose(similarity, slot) is slot
    assert DUAL.choose(similarity).argmax(1).tolist() == [2, 0]
    for choice in (INPUT.choose(similarity, slot), INPUT.choose(similarity)):
        assert choice.argmax(2).tolist() == [[2, 3], [0, 3]]


def test_keys_choose_from_the_whole_grown_pool() -> None:
    """The number of prompts is that of the parameters, not the one at first."""
    body = prompted(DualPrompts(slots=1, length=3))
    params, queries = start(body), body.query(images(), ForwardPass())
    for task in (1, 2):
        params = body.prompts.grow(params, task, torch.Generator().manual_seed(task))
    params["prompt.keys"][2], params["prompt.keys"][1] = queries[3], queries[0]
    features = body.features(params, images(), ForwardPass())
    for row, slot in ((3, 2), (0, 1)):
        expected = body.features_with(params, images(), torch.eye(3)[slot], ForwardPass())
        torch.testing.assert_close(features[row], expected[row])
