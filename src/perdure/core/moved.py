"""Old import paths and names of perdure 0.1 and 0.2, which a custom method may still use.

They resolve to their new places until 0.4, with a DeprecationWarning and a line in the log.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

_ROOT = "perdure."
_PACKAGES = frozenset({"engines.flower", "federation"})

MODULES = {
    "algebra.columns": "algebra.accumulators",
    "algebra.ranks": "algebra.rank_rules",
    "data.arrays": "data.readers.npz",
    "data.domains": "data.streams.domains",
    "data.examples": "data.source",
    "data.hub": "data.readers.huggingface",
    "data.idx": "data.readers.idx",
    "data.images": "data.readers.image_folder",
    "data.joined": "data.streams.joined",
    "data.known": "data.feature_cache",
    "data.permuted": "data.streams.permuted",
    "data.pool": "data.streams.pool",
    "data.shapes": "data.resize",
    "data.shares": "data.partition",
    "data.sources": "data.load",
    "data.split": "data.streams.split",
    "data.tasks": "data.streams.stream",
    "data.text": "data.readers.text",
    "data.tokens": "data.tokenization",
    "engines.flower": "flower",
    "engines.flower.apps": "flower.apps",
    "engines.memory": "engines.malloc",
    "engines.steps": "engines.traced_steps",
    "engines.work": "engines.in_process",
    "errors": "core.errors",
    "federation": "training",
    "federation.evaluation": "contract.evaluation",
    "federation.experiment": "training.experiment",
    "federation.ledger": "contract.ledger",
    "federation.loop": "training.loop",
    "federation.messages": "contract.upload_collector",
    "federation.sampling": "training.sampling",
    "federation.state": "training.state",
    "methods.parts.activations": "methods.parts.layer_inputs",
    "methods.parts.geometry": "methods.parts.projection_diagnostics",
    "methods.parts.noise": "methods.parts.sketch_noise",
    "methods.parts.projection": "methods.parts.protected_layers",
    "methods.parts.protection": "methods.parts.protected_layers",
    "methods.parts.references": "methods.parts.routing",
    "metrics": "training.metrics",
    "models.bodies": "models.factory",
    "models.checkpoints": "models.pretrained",
    "models.heads": "models.outputs",
    "models.hugging_face": "models.huggingface_names",
    "models.passes": "models.forward_pass",
    "models.pretraining": "models.backbone_init",
    "models.stacked": "models.stacked_linear",
    "models.text": "models.text_encoder",
    "numbers": "config.types",
    "privacy.account": "training.privacy_summary",
    "privacy.accounting": "privacy.renyi",
    "privacy.extra": "core.optional",
    "privacy.settings": "config.privacy",
    "problems": "config.messages",
    "rng": "core.rng",
    "runs.dry_run": "execution.dry_run",
    "runs.encoding": "core.encoding",
    "runs.files": "core.files",
    "runs.following": "runs.progress",
    "runs.model": "runs.trained_model",
    "runs.runner": "execution.runner",
    "runs.store": "training.client_store",
    "sections": "config.base",
    "trees": "core.trees",
    "version": "core.version",
}
"""Old module -> new module, both below `perdure`."""

NAMES = {
    "algebra.accumulators": {
        "Sample": "ColumnSample",
        "Spread": "GramAccumulator",
        "layer_columns": "methods.parts.layer_inputs.layer_columns",
    },
    "algebra.alignment": {
        "Recipe": "SearchSettings",
        "equalizing": "norm_factors",
        "exact": "solve_exactly",
        "grams": "gram_matrices",
        "model_grams": "model_gram_matrices",
        "published": "published_search",
    },
    "algebra.coresets": {"literal": "select_by_eq5", "shares": "draw_mix_weights"},
    "algebra.gaussians": {"drawn_around": "draw_around"},
    "algebra.prototypes": {"prototypical": "prototypical_loss"},
    "algebra.rank_rules": {"significant": "count_significant"},
    "algebra.sketches": {
        "clip_norm": "privacy.gaussian_mechanism.clip_norm",
        "paper_sigma": "privacy.gaussian_mechanism.fot_sigma",
        "standard_sigma": "privacy.gaussian_mechanism.gaussian_sigma",
    },
    "algebra.subspaces": {
        "Space": "Subspace",
        "extend": "extend_basis",
        "principal": "principal_directions",
        "project": "project_out",
        "project_right": "project_out_rows",
        "residual": "project_out_columns",
    },
    "config.base": {"Section": "ConfigSection"},
    "config.types": {
        "Count": "PositiveInt",
        "Natural": "NonNegativeInt",
        "NotNegative": "NonNegativeFloat",
        "Positive": "PositiveFloat",
        "Real": "FiniteFloat",
        "Share": "Fraction",
        "Whole": "Integer",
        "no_switch": "reject_bool",
    },
    "contract.evaluation": {
        "Count": "EvaluationCounts",
        "Judge": "Evaluator",
        "Scores": "Evaluation",
    },
    "core.rng": {"Draws": "Rng", "SystemDraws": "SystemRng", "derive": "derive_seed"},
    "core.trees": {"as_read": "as_decoded", "column": "per_client"},
    "methods.parts.coreset_memory": {
        "Keeper": "CoresetSelector",
        "Past": "methods.parts.coreset_gradients.StackedCoresets",
    },
    "methods.parts.distillation": {
        "distillation": "distillation_loss",
        "from_teacher": "teacher_loss",
    },
    "methods.parts.layer_inputs": {
        "Holder": "ColumnSink",
        "input_roots": "gram_roots",
        "observe": "collect_layer_inputs",
        "sampled_inputs": "sample_layer_inputs",
        "some_rows": "sample_rows",
    },
    "methods.parts.previous_model": {"norm": "total_norm"},
    "methods.parts.protected_layers": {
        "Spaces": "Subspaces",
        "broadcast_spaces": "send_subspaces",
        "left_over": "interference",
        "project_change": "project_out_change",
        "protectable": "layers_shared_by_tasks",
        "selected": "select_layers",
        "space_of": "layer_subspace",
        "still_trained": "trainable_names",
        "used": "used_fraction",
        "widen": "add_directions",
    },
    "models": {"Pass": "ForwardPass"},
    "models.backbone_init": {"RANDOM": "RANDOM_INIT", "Start": "BackboneInit"},
    "models.forward_pass": {"Pass": "ForwardPass"},
    "models.layers": {"Start": "InitScheme", "groups": "models.modules.norms.group_count"},
    "models.pretrained": {"Checkpoint": "PretrainedWeights", "find": "find_weights"},
    "models.prompts": {"Frozen": "models.frozen_backbone.FrozenBackbone"},
    "training.experiment": {"prepare": "build_experiment"},
    "training.state": {"Counts": "RunCounters", "State": "RunState"},
}
"""Module (new path) -> old name -> new name, with its module if that is another one."""


def install() -> None:
    """Make old import paths and names work. To be called before other modules are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds modules at their old paths, and adds the old names to those that have some."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for modules in the two tables, else None."""
        name = fullname.removeprefix(_ROOT)
        if name == fullname:
            return None
        if name in MODULES:
            loader = _MovedLoader(_ROOT + MODULES[name])
            return ModuleSpec(fullname, loader, is_package=name in _PACKAGES)
        return _with_old_names(PathFinder.find_spec(fullname, path)) if name in NAMES else None


class _MovedLoader(Loader):
    """Loads an old module as a view of the new one."""

    def __init__(self, new: str) -> None:
        self._new = new

    def exec_module(self, module: ModuleType) -> None:
        """Give the old module everything that the new one has."""
        _warn(module.__name__, self._new)
        target = import_module(self._new)
        public = {name: value for name, value in vars(target).items() if name[0] != "_"}
        vars(module).update(public, __getattr__=partial(getattr, target))


def _with_old_names(spec: ModuleSpec | None) -> ModuleSpec | None:
    if spec is not None and spec.loader is not None:
        loader = spec.loader
        vars(loader)["exec_module"] = partial(_run_module, loader.exec_module)
    return spec


def _run_module(run: Any, module: ModuleType) -> None:
    run(module)
    vars(module)["__getattr__"] = partial(_old_name, module)


def _old_name(module: ModuleType, name: str) -> Any:
    new = NAMES[module.__name__.removeprefix(_ROOT)].get(name)
    if new is None:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    home, _, new_name = f"{module.__name__}.{new}".rpartition(".")
    if "." in new:
        home = _ROOT + new.rpartition(".")[0]
    _warn(f"{module.__name__}.{name}", f"{home}.{new_name}")
    return getattr(import_module(home), new_name)


@cache
def _warn(old: str, new: str) -> None:
    """Warn once per old path."""
    message = f"{old} is now {new}; the old name goes away in perdure 0.4"
    log.warning(message)
    warnings.warn(message, DeprecationWarning, stacklevel=3)
