"""Task identity from Gaussians of classes: beyond FedProTIP's paper, as an option.

At a task's end clients send counts, totals and Gram matrices of their classes' features, as sums. A
class is a Gaussian whose covariance is half its own and half the one that all classes share; a
task's density is the mixture of its classes'. A row belongs to the task of the largest density, a
batch of one task to that of the largest product of densities.

A row can also be of no known task. The squared distance d = (f - m)^T C^-1 (f - m) of rows of a
Gaussian N(m, S) has the mean tr M and the variance 2 tr M^2 for M = C^-1 S, where C is S moved
towards the identity. It is taken for a multiple of a chi-squared variable with these two moments,
whose upper tail is the probability that a row of the class lies as far away. Features have heavier
tails than a Gaussian and drift as later tasks are learned, so that more known rows are rejected
than the tail says; the majority of a batch decides more safely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from perdure.algebra.class_statistics import quadratic_logits, squared_distances
from perdure.contract.context import Client, Context, Server, warn_nothing_sent
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.closed_form import (
    ClassGaussians,
    class_sums,
    warn_of_missing_classes,
)
from perdure.models.network import Network, Outputs
from perdure.models.ops import ForwardPass

_SHRINKAGE = 0.1
"""Fraction of the way to the identity. At 0, classes of few rows have no inverse."""


# ---- features


def hidden_names(network: Network, layers: int) -> list[str]:
    """Return the names of the last layers of the body whose inputs the router sees as well.

    The first layer's inputs are the examples themselves, which are not among them.
    """
    names = [layer.name for layer in network.layers[1:]]
    return names[max(0, len(names) - (layers - 1)) :]


def joined_features(features: Tensor, layer_inputs: Tensors, names: list[str]) -> Tensor:
    """Return layer inputs, averaged over positions, beside the final features, double [rows, D].

    Args:
        features: float [rows, feature size].
        layer_inputs: By weight name float [rows, inputs], [rows, tokens, inputs] or
            [rows, channels, height, width].
        names: Names of the layers.

    """
    parts = [_over_positions(layer_inputs[name]) for name in names]
    return torch.cat([*parts, features], dim=1).double()


def _over_positions(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x.mean((2, 3))
    return x.flatten(1, -2).mean(1) if x.dim() > 2 else x


def router_features(server: Server, x: Tensor, network: Network, layers: int) -> Tensor:
    """Return what the router sees of a batch, double [rows, D]."""
    layer_inputs: Tensors = {}
    fwd = ForwardPass(buffers=server.buffers, layer_inputs=layer_inputs)
    features = network.features(server.params, x, fwd)
    return joined_features(features, layer_inputs, hidden_names(network, layers))


def client_router_features(client: Client, layers: int) -> Tensor:
    """Return what the router sees of all the client's examples of the task, double [rows, D]."""
    names, rows = hidden_names(client.context.network, layers), []
    with torch.no_grad():
        for batch in client.data.batches():
            layer_inputs: Tensors = {}
            features = client.features(batch, layer_inputs=layer_inputs)
            rows.append(joined_features(features, layer_inputs, names))
    return torch.cat(rows)


# ---- the exchange


def send_class_sums(client: Client, layers: int) -> ClientResult:
    """Send the sums of the features of each of the task's classes with enough rows."""
    client = client.without_small_classes()
    task, outputs = client.context.task, client.context.network.outputs
    mask = outputs.task_mask(task, task)
    labels = client.data.targets[client.data.index]
    numbers = (mask.cumsum(0) - 1).to(labels.device)[labels]  # of each row's class in the task
    features = client_router_features(client, layers)
    sums = class_sums(features, numbers, int(mask.sum()), per_class=True)
    return ClientResult({"gaussians": Sum(sums, weight=1.0)})


def gather_gaussians(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Append the Gaussians of the task's classes; those of earlier tasks may be missing."""
    sums = uploads.total("gaussians") if uploads.has("gaussians") else None
    if sums is None or not sums["count"].sum():
        warn_nothing_sent("fedprotip", context, "the router does not know this task")
        return server
    warn_of_missing_classes("fedprotip", context, sums["count"])
    new, old = ClassGaussians.from_sums(sums).tree(), server.state.gaussians
    outputs = replace(context.network.outputs, kind="growing")
    missing = outputs.first_output(context.task) - (len(old["count"]) if old else 0)
    parts = [*([old] if old else []), {n: _zero_rows(v, missing) for n, v in new.items()}, new]
    joined = {name: torch.cat([part[name] for part in parts]) for name in new}
    return replace(server, state=replace(server.state, gaussians=joined))


def _zero_rows(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros(rows, *like.shape[1:])


def task_means(classes: ClassGaussians, outputs: Outputs) -> Tensor:
    """Return the mean of all examples of each task, double [tasks, D]."""
    weights = _task_masks(outputs, len(classes.count)).to(classes.count.device) * classes.count
    return weights @ classes.mean / weights.sum(1, keepdim=True).clamp(min=1)


# ---- tasks that a router may not tell apart: the same inputs with other labels

_CLOSEST = 0.1
"""Distance of two tasks' means, relative to the spread of classes, below which they are alike."""


def alike_warnings(gaussians: Tensors, outputs: Outputs) -> dict[str, str]:
    """Return a warning if the features of two of the tasks so far are hardly different."""
    if not gaussians:
        return {}
    classes = ClassGaussians.read(gaussians)
    spread = classes.shared_covariance().trace().sqrt().clamp(min=1e-12)
    pair = alike_tasks(task_means(classes, outputs) / spread, _CLOSEST)
    if pair is None:
        return {}
    return {
        "alike": f"fedprotip: the features of task {pair[1] + 1} are hardly different from those "
        f"of task {pair[0] + 1}; tasks with the same inputs and other labels cannot be "
        "distinguished"
    }


def alike_tasks(descriptions: Tensor, closest: float) -> tuple[int, int] | None:
    """Return the first two tasks that are nearer to each other than `closest`, or None.

    Args:
        descriptions: float [tasks, D].
        closest: A distance.

    """
    for task in range(1, len(descriptions)):
        distances = (descriptions[:task] - descriptions[task]).norm(dim=1)
        if float(distances.min()) < closest:
            return int(distances.argmin()), task
    return None


# ---- the prediction


def task_scores(
    features: Tensor,
    gaussians: Tensors,
    outputs: Outputs,
    batch: int | None = None,
    unknown: float = 0.0,
) -> Tensor:
    """Return the log-density of each row under each task, with the task's prior.

    Args:
        features: double [rows, D].
        gaussians: `ClassGaussians.tree()` of the classes of each task so far; a class of two tasks
            has two Gaussians.
        outputs: Which classes belong to which task.
        batch: If given, consecutive batches of so many rows are of one task each.
        unknown: The tail of a task's nearest class below which a row is of no known task; a batch
            is if more than half of its rows are.

    Returns:
        double [rows, tasks], up to a constant; -inf for all tasks of rows of no known task.

    """
    classes = ClassGaussians.read(gaussians)
    scores = joint_scores(*task_log_densities(features, classes, outputs), batch)
    if not unknown:
        return scores
    masks = _task_masks(outputs, len(classes.count)).to(scores.device)
    tails = class_tails(features, classes).unsqueeze(1) * masks
    is_far = tails.amax(2).gather(1, scores.argmax(1, keepdim=True)) < unknown
    return scores.masked_fill(_mean_by_batch(is_far.double(), batch) > 0.5, -torch.inf)


def task_log_densities(
    features: Tensor, classes: ClassGaussians, outputs: Outputs
) -> tuple[Tensor, Tensor]:
    """Return the log-density of each row under each task, and each task's log prior.

    Args:
        features: double [rows, D].
        classes: The Gaussians of the classes of each task so far.
        outputs: Which classes belong to which task.

    Returns:
        double [rows, tasks], up to a constant; double [tasks], of the task's share of all examples.

    """
    covariances = classes.half_shared_covariances(_SHRINKAGE)
    logits = quadratic_logits(features, classes.count, classes.mean, covariances)
    masks = _task_masks(outputs, len(classes.count)).to(logits.device)
    joint = logits.unsqueeze(1).masked_fill(~masks, -torch.inf).logsumexp(2)
    shares = (masks * classes.count).sum(1) / classes.count.sum()
    priors = shares.clamp(min=1e-12).log()
    return (joint - priors).masked_fill(shares == 0, -torch.inf), priors


def _task_masks(outputs: Outputs, count: int) -> Tensor:
    """Return the Gaussians of each task, bool [tasks, Gaussians]: in the order of their tasks."""
    growing = replace(outputs, kind="growing")
    tasks = [t for t in range(len(outputs.task_classes)) if growing.first_output(t + 1) <= count]
    return torch.stack([growing.task_mask(task, tasks[-1]) for task in tasks])


def joint_scores(log_densities: Tensor, log_priors: Tensor, batch: int | None = None) -> Tensor:
    """Return the log-density of each row, or of its batch, with the prior: [rows, tasks].

    Args:
        log_densities: [rows, tasks].
        log_priors: [tasks]. They count once per decision, not once per row of a batch.
        batch: If given, consecutive batches of so many rows are of one task each.

    """
    if batch is None:
        return log_densities + log_priors
    rows = [log_priors + part.sum(0).expand_as(part) for part in torch.split(log_densities, batch)]
    return torch.cat(rows)


def class_tails(features: Tensor, classes: ClassGaussians) -> Tensor:
    """Return the probability that an example of a class lies as far from its mean as each row.

    Args:
        features: double [rows, D].
        classes: The Gaussians.

    Returns:
        double [rows, classes]; 0 for classes without examples.

    """
    factors = torch.linalg.cholesky(classes.half_shared_covariances(_SHRINKAGE))
    ratios = torch.cholesky_solve(classes.half_shared_covariances(0.0), factors)  # C^-1 S
    mean = ratios.diagonal(dim1=1, dim2=2).sum(1).clamp(min=1e-12)
    half_variance = (ratios * ratios.transpose(1, 2)).sum((1, 2)).clamp(min=1e-12)
    freedom, scale = mean.square() / half_variance, half_variance / mean
    distances = squared_distances(features, classes.mean, factors)
    tails: Tensor = torch.special.gammaincc(freedom / 2, distances / (2 * scale))
    return tails * (classes.count > 0)


def _mean_by_batch(values: Tensor, batch: int | None) -> Tensor:
    if batch is None:
        return values
    return torch.cat([part.mean().expand_as(part) for part in torch.split(values, batch)])


@dataclass(frozen=True)
class GaussianRouter:
    """The task of the largest density of Gaussian classes, which clients send as sums."""

    layers: int
    """Layers that the router sees; see `hidden_names`."""
    batch: int | None
    """If given, consecutive batches of so many rows are of one task each."""
    unknown: float
    """Tail of a class below which a row is of no known task; see `task_scores`."""

    def exchange(self) -> Exchange:
        """Return the exchange that adds the task's classes to `server.state.gaussians`."""
        send = partial(send_class_sums, layers=self.layers)
        return Exchange("gaussians", client_work=send, aggregate=gather_gaussians)

    def task_scores(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """Return the log-density of each row under each task; None before there are any."""
        gaussians, outputs = server.state.gaussians, network.outputs
        if not gaussians:
            return None
        rows = router_features(server, x, network, self.layers)
        return task_scores(rows, gaussians, outputs, self.batch, self.unknown)
