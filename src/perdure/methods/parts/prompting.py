"""Prompts on a frozen backbone: the base of Fed-L2P, Fed-DualP and PIP, and its prototypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from perdure.algebra.class_statistics import Gaussians, draw_around
from perdure.config.section import Fixed, NonNegativeInt, PositiveInt, Search
from perdure.contract.context import Client, Context, Server, warn_nothing_sent
from perdure.contract.exchanges import Exchange, Prepared
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Step
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.backbones import FrozenBackbone
from perdure.models.network import Network
from perdure.models.ops import ForwardPass
from perdure.models.prompts import KEYS, DualPrompts, InputPrompts, Pool, Prompted

# ---- Base of Fed-L2P, Fed-DualP and PIP: prompts on a frozen backbone, trained by FedAvg
#
# Clients and server exchange prompts, keys and the head. All of them have the backbone from the
# start, and it does not change. A client's loss (PIP, eq. 5) is
#     L = CE(head(features with prompts), y) - lambda * mean over the batch of cos(query, keys),
# where cosines are summed over the keys of the prompts that the row trains. It includes only the
# outputs of the task's classes. At test time a row's query chooses its prompts.

PROMPTS_NEED = Needs(
    streams=frozenset({"split", "domains", "permuted"}),
    prefers=Preferences(
        head={"split": "shared"},
        active_outputs="task",
        weighting="uniform",
        demanded={"active_outputs": "the papers train the outputs of the task alone"},
    ),
    prediction_state=("seen",),
    stable_features=True,
)
"""The needs of all methods that train prompts: those of the papers."""


Keys = Literal["learned", "mean"]
"""learned: trained by the matching loss. mean: in closed form, and not trained."""


@dataclass(frozen=True)
class PromptState:
    """Server state: what prediction needs besides the model."""

    seen: int = 0
    """Number of tasks so far: the prompts of the first `seen` slots have been trained."""


@dataclass(frozen=True)
class Prompting(Method):
    """Base class of methods that train prompts and a head.

    A subclass declares the kind of prompts and the loss.
    """

    length: Annotated[PositiveInt, Fixed()] = 5
    """Tokens per prompt (the paper's L_p)."""
    pool: Annotated[PositiveInt, Fixed()] = 10
    """Number of prompts; expert prompts (dualp) are one per task, so their pool grows with later
    tasks."""
    cache: bool = True
    """Compute the query of each example once and store it. If false, in every step."""

    ServerState: ClassVar[type] = PromptState

    @property
    def prompts(self) -> Pool:
        """The kind of prompts."""
        raise NotImplementedError

    def check_config(self, config: Any) -> str | None:
        """Refuse models without prompts, trained blocks, and weight decay of earlier prompts."""
        model, decay, prompts = config.model, config.train.weight_decay, self.prompts
        if not model.takes_prompts:
            return f"model.kind: must be vit or text with prompts, got {model.kind!r}"
        if model.reads_text and self.length > model.max_tokens:
            expected = f"1 to {model.max_tokens} (model.max_tokens)"
            return f"method.length: must be {expected}, got {self.length}"
        if model.train_layers is not None:
            expected = "null with prompts, since the backbone is not trained"
            return f"model.train_layers: must be {expected}, got {model.train_layers}"
        if decay:
            expected = "0 with prompts, since it would shrink those of earlier tasks"
            return f"train.weight_decay: must be {expected}, got {decay}"
        if isinstance(prompts, InputPrompts) and prompts.top > prompts.slots:
            return f"method.top: must be 1 to {prompts.slots} (method.pool), got {prompts.top}"
        return None

    def wrap_network(self, network: Network) -> Network:
        """Return the network with prompts on its backbone, which is frozen."""
        backbone: Any = network.body
        check_prompts(self.prompts, backbone)
        frozen = FrozenBackbone(backbone, backbone.frozen())
        return replace(network, body=Prompted(frozen, self.prompts, self.cache))

    def predict_features(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return features with the prompts that each row's query chooses among the trained ones.

        The arguments are those of `predict`.
        """
        body = prompted_body(network)
        choice = body.prompts.choose(trained_similarity(server, x, network))
        return body.features_with(server.params, x, choice, ForwardPass())

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return the cosine with each task's key, or None if prompts do not belong to tasks."""
        if not prompted_body(network).prompts.by_task:
            return None
        return trained_similarity(server, x, network)


@dataclass(frozen=True)
class EitherPrompting(Prompting):
    """Base class of methods that train the prompts of DualPrompt or those of L2P."""

    prompt: Literal["dualp", "l2p"] = "dualp"
    """dualp: prefixes, one expert per task. l2p: tokens at the input."""
    general_layers: Annotated[tuple[NonNegativeInt, ...], Fixed()] = (0, 1)
    """Blocks with the general prompt g (dualp)."""
    expert_layers: Annotated[tuple[NonNegativeInt, ...], Fixed()] = (2, 3, 4)
    """Blocks with the expert prompt e (dualp)."""
    prefix: Literal["after", "before"] = "after"
    """Where prefixes join: after a block's projections, as keys and values, or before them, so that
    they are multiplied by W^K and W^V (dualp), as eqs. 3 and 4 print."""
    top: Annotated[PositiveInt, Fixed()] = 5
    """Prompts per example (l2p)."""
    lambda_: Annotated[float | None, Field(alias="lambda", ge=0), Search(0.01, 2, log=True)] = None
    """Weight of the matching loss. Default: 1.0 for dualp, 0.1 for l2p."""
    keys: Keys = "learned"
    """Keys of the experts (dualp): trained by the matching loss (learned), or the mean direction of
    the task's queries (mean, not in the paper), for which clients send a sum before training."""

    @property
    def prompts(self) -> Pool:
        """The prompts of L2P or of DualPrompt."""
        if self.prompt == "l2p":
            return InputPrompts(self.pool, self.length, self.top)
        layers = self.general_layers, self.expert_layers
        return DualPrompts(self.pool, self.length, *layers, projected=self.prefix == "before")

    @property
    def matching(self) -> float:
        """Lambda, by default that of the prompts' own paper."""
        default = 0.1 if self.prompt == "l2p" else 1.0
        return default if self.lambda_ is None else self.lambda_

    def check_config(self, config: Any) -> str | None:
        """Refuse mean keys of L2P too, whose prompts belong to no task."""
        if self.keys == "mean" and self.prompt == "l2p":
            reason = "with prompt l2p, whose prompts belong to no task"
            return f"method.keys: must be 'learned' {reason}, got 'mean'"
        return super().check_config(config)


def check_prompts(prompts: Any, backbone: Any) -> None:
    """Refuse prompts that are longer than the backbone's sequence, or in blocks it lacks."""
    max_length = getattr(backbone, "tokens", None) or backbone.positions
    if prompts.length > max_length:
        expected = f"1 to {max_length}, the tokens of the backbone's sequence"
        raise bad_value("method.length", prompts.length, expected)
    if isinstance(prompts, DualPrompts):
        _check_blocks(prompts, backbone.encoder.depth)


def _check_blocks(prompts: DualPrompts, depth: int) -> None:
    blocks = {"general_layers": prompts.general, "expert_layers": prompts.expert}
    for name, chosen in blocks.items():
        if any(block >= depth for block in chosen) or len(set(chosen)) < len(chosen):
            expected = f"different blocks of the backbone, from 0 to {depth - 1}"
            raise bad_value(f"method.{name}", list(chosen), expected)
    if set(prompts.general) & set(prompts.expert):
        expected = "blocks that method.general_layers does not name"
        raise bad_value("method.expert_layers", list(prompts.expert), expected)


# ---- server


def open_task(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Initialize the task's expert prompt from the previous one, and count the task as seen."""
    params = prompted_body(context.network).prompts.start_task(server.params, context.task)
    return replace(server, params=params, state=replace(server.state, seen=context.task + 1))


OPEN_TASK = Exchange("prompts", "none", aggregate=open_task)
"""Opening exchange of every task."""


# ---- client


def prepare_slot(client: Client) -> Prepared:
    """Return the task's slot of the prompt pool, for the loss."""
    return Prepared(tensors=task_slot(client))


def task_slot(client: Client) -> Tensors:
    """Return {"slot": float [slots]}, 1 at the task's prompt; empty if tasks share prompts."""
    context = client.context
    if not prompted_body(context.network).prompts.by_task:
        return {}
    task = torch.tensor(context.task, device=client.data.index.device)
    return {"slot": one_hot(task, context.parameters[KEYS][0]).float()}


def prompted_features(
    network: Network, params: Tensors, x: Tensor, slot: Tensor | None, fwd: ForwardPass
) -> tuple[Tensor, Tensor]:
    """Return the head's input, and the sum of cosines of each row with the keys that it trains.

    Args:
        network: A network with a prompted body.
        params: All parameters.
        x: Examples [rows, ...].
        slot: float [slots], 1 at the prompt to use. If None, each row's query chooses.
        fwd: Circumstances of the forward pass.

    Returns:
        float [rows, feature size], and float [rows].

    """
    body = prompted_body(network)
    similarity = body.similarity(params, x, fwd)
    choice = body.prompts.choose(similarity, slot)
    match = (similarity.unsqueeze(1) * choice).sum((1, 2))
    return body.features_with(params, x, choice, fwd), match


def prompted_step_features(step: Step) -> tuple[Tensor, Tensor]:
    """Return `prompted_features` for the rows of a local step."""
    slot = step.tensors.get("slot")
    return prompted_features(step.network, step.params, step.batch.x, slot, step.fwd)


def matching_loss(step: Step, weight: float) -> Tensor:
    """Return the loss of every row (eq. 5), with lambda = `weight`."""
    features, match = prompted_step_features(step)
    return step.cross_entropy(step.classify(features)) - weight * match


# ---- inference


def trained_similarity(server: Server, x: Tensor, network: Network) -> Tensor:
    """Return the cosine of each row with each key, [rows, slots]; -inf for untrained prompts."""
    body = prompted_body(network)
    return body.seen_similarity(server.params, x, server.state.seen, ForwardPass())


def prompted_body(network: Network) -> Prompted:
    """Return the prompted body of a wrapped network."""
    assert isinstance(network.body, Prompted)
    return network.body


# ---- Keys in closed form, for prompts of which each belongs to a task
#
# The key of a task is the one with the largest mean cosine with the task's queries q_i,
#     k = argmax sum_i cos(q_i, k) = s / |s|,   where   s = sum_i q_i / |q_i|,
# over the examples of all clients: the minimum of the matching loss, which training approaches
# in small steps. Queries are features of the backbone without prompts and never change, so one
# exchange before training is enough, in which each client sends its part of the sum s.


def opening_of_keys(keys: Keys) -> list[Exchange]:
    """Return the opening exchange that sets the task's key, if keys are means."""
    if keys == "learned":
        return []
    return [Exchange("keys", client_work=sum_queries, aggregate=set_key)]


def trained_with_keys(keys: Keys, context: Context) -> tuple[str, ...] | None:
    """Return the names that are trained: without the keys, if these are means; None for all."""
    if keys == "learned":
        return None
    return tuple(name for name in context.trainable if name != KEYS)


def sum_queries(client: Client) -> ClientResult:
    """Send the sum of the client's queries, each of length 1: float [width]."""
    network, directions = client.context.network, []
    for batch in client.data.batches():
        body = prompted_body(network.with_cached_features(batch.cached_features))
        queries = body.query(batch.x, ForwardPass()).double()
        directions.append(normalize(queries, dim=1).sum(0))
    total = torch.stack(directions).sum(0).float()
    return ClientResult({"queries": Sum({"total": total}, weight=1.0)})


def set_key(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Set the task's key; without any upload it stays as it was initialized."""
    if not uploads.has("queries"):
        warn_nothing_sent("keys", context, "the key of the task is a random one")
        return server
    keys = server.params[KEYS].clone()
    keys[context.task] = normalize(uploads.total("queries")["total"], dim=0).to(keys)
    return replace(server, params=server.params | {KEYS: keys})


# ---- Prototypes of classes as further inputs of the head, next to the features of a batch (PIP).


def no_prototypes(server: Server, context: Context) -> Gaussians:
    """Return Z_G = {}: classes of the task without a prototype are zero and do not count."""
    classes = len(context.network.outputs.task_classes[context.task])
    device = next(iter(server.params.values())).device
    return Gaussians.empty(classes, context.network.feature_size, device)


def augment_prototypes(client: Client, shared: Tensors, copies: int, both_sides: bool) -> Tensors:
    """Return the prototypes of each epoch with their augmentations (PIP, eq. 11), and labels.

    Returns:
        `points` float [epochs, (1 + copies) * classes, D] and `labels` int64, of all classes that
        have a prototype.

    """
    device = client.data.index.device
    shared = {name: value.to(device) for name, value in shared.items()}
    prototypes = Gaussians(**{"variance": torch.zeros_like(shared["mean"]), **shared})
    present, generator = prototypes.there > 0, client.secret("augment")
    epochs = [
        draw_around(prototypes, copies, both_sides, generator)[:, present]
        for _ in range(client.epochs)
    ]
    labels = task_outputs(client)[present].repeat(1 + copies)
    return {"points": torch.stack(epochs).flatten(1, 2), "labels": labels}


def inject_prototypes(features: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Return head inputs and step, with the epoch's prototypes added as further rows.

    Args:
        features: float [rows, feature size]. Head inputs of the batch.
        step: The local step, with the tensors of `augment_prototypes`.

    """
    batch, points, labels = step.batch, step.tensors["points"], step.tensors["labels"]
    epoch = torch.zeros_like(labels[:1]) if batch.epoch is None else batch.epoch.reshape(1)
    points = points.index_select(0, epoch).squeeze(0)
    mask = batch.mask
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(labels, dtype=mask.dtype)])
    joined = replace(batch, y=torch.cat([batch.y, labels]), mask=mask)
    return torch.cat([features, points]), replace(step, batch=joined)


def class_moments(client: Client, params: Tensors) -> Gaussians:
    """Return the mean and biased variance of each class's head inputs (PIP, eqs. 7 and 8)."""
    network, slot = client.context.network, task_slot(client).get("slot")
    outputs, rows, labels = task_outputs(client), [], []
    if not len(client.data):
        return Gaussians.empty(len(outputs), network.feature_size, outputs.device)
    with torch.no_grad():
        for batch in client.data.batches():
            known = network.with_cached_features(batch.cached_features)
            rows.append(prompted_features(known, params, batch.x, slot, ForwardPass())[0])
            labels.append(torch.searchsorted(outputs, batch.y))
    return Gaussians.of(torch.cat(rows), torch.cat(labels), len(outputs))


def task_outputs(client: Client) -> Tensor:
    """Return the outputs of the task's classes, int64 [classes]."""
    outputs, task = client.context.network.outputs, client.context.task
    classes = torch.tensor(outputs.task_classes[task])
    return outputs.targets(task)[classes].to(client.data.index.device)
