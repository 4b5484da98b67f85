"""Parts of an experiment that its config chooses: device, outputs of the head, feature cache."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.method import Method
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.feature_cache import CacheFolder, with_feature_cache
from perdure.data.streams import Stream
from perdure.models.adapter.build import ModuleSetup
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network, make_network
from perdure.models.outputs import Outputs
from perdure.models.prompts import Prompted
from perdure.training.checks import warn_of_unprotected
from perdure.training.open_settings import choose_head


def choose_device(name: str) -> torch.device:
    """Return the device of `config.device`; `auto` chooses a GPU if there is one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    gpus = [kind for kind, is_available in available.items() if is_available]
    if name == "auto":
        return torch.device(next(iter(gpus), "cpu"))
    if not available.get(name, True):
        raise bad_value("device", name, f"{', '.join(['auto', 'cpu', *gpus])} on this machine")
    return torch.device(name)


def make_outputs(config: Config, method: Method, stream: Stream) -> Outputs:
    """Return the outputs of the head that `model.head` or else the method chooses."""
    kind = choose_head(config, method.needs)
    is_number = config.data.target == "number"
    return Outputs(kind, stream.classes, stream.task_classes, stream.known_classes, is_number)


def first_rows(stream: Stream, count: int = 6) -> Tensor:
    """Return the first training rows of the first task, [at most `count`, ...]."""
    inputs = stream.tasks[0].train
    return inputs.gather(torch.arange(min(count, len(inputs)), device=inputs.device))


def network_of(
    config: Config, method: Method, stream: Stream, rows: Tensor | None, folder: Path | None
) -> Network:
    """Return the network of a config as the method trains it.

    Args:
        config: The config.
        method: The method.
        stream: The stream.
        rows: A few inputs that a custom module is tried on. If None, random ones.
        folder: Where the file of a custom module is looked up.
    """
    setup = ModuleSetup(folder, Rng(config.seed).key("init"), rows)
    outputs = make_outputs(config, method, stream)
    network = method.wrap_network(make_network(config.model, stream.shape, outputs, setup=setup))
    warn_of_unprotected(method.needs, network)
    return network


def cache_frozen_features(stream: Stream, network: Network, folder: Path | None = None) -> Stream:
    """Return the stream with a cache for the features of a frozen backbone.

    Args:
        stream: The stream.
        network: The network. If no part of it is a frozen backbone with prompts, the stream is
            returned unchanged.
        folder: Folder for features that other processes reuse. If None, or if the backbone has
            random weights, they stay in memory.
    """
    body = network.body
    if not (isinstance(body, Prompted) and body.caches_queries):
        return stream
    backbone = network.backbone
    cache = CacheFolder(folder, backbone["sha256"]) if folder is not None and backbone else None
    return with_feature_cache(
        stream, lambda x: body.query(x, ForwardPass()), body.feature_size, cache
    )
