"""The `model` section of a config: the base of all kinds."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from perdure.config.section import KindSection


class ModelConfig(KindSection):
    """The network that is trained. A kind is a subclass with its keys, facts and `make_body`.

    `MODELS` in perdure.models.kinds names those of this library. Any nn.Module is a model, too: by
    its dotted path, by the name that an installed package gives it, or as an object in Python.

    Example: `model: {kind: mlp, hidden: [100, 100]}`
    """

    registry_path: ClassVar[str] = "perdure.models.kinds:MODELS"

    kind: str = ""
    """The network: mlp, conv, alexnet, resnet18-reduced, resnet18, resnet20, resnet32, vit or
    text; or the dotted path of an nn.Module such as mynet.Net."""
    head: Literal["shared", "growing"] | None = None
    """`shared`: one output per class. `growing`: one block of outputs per task. Default: chosen by
    the method; one for all methods of a comparison."""
    init: str | None = None
    """Initial weights: a safetensors file, or a run directory; of a run with the same model and
    method the server's state, too. Default: random."""

    reads_text: ClassVar[bool] = False
    """Whether its inputs are the tokens of texts."""
    takes_prompts: ClassVar[bool] = False
    """Whether it is a transformer that may be frozen and get prompts."""
    scales_inputs: ClassVar[bool] = True
    """Whether inputs are normalized unless the config says otherwise."""

    def make_body(self, shape: tuple[int, ...], classes: int, setup: Any) -> Any:
        """Return the network without its head, a `perdure.models.layers.Body`.

        Args:
            shape: Shape of an input.
            classes: Number of outputs in the first task.
            setup: What it is built with besides its config, a `perdure.models.layers.Setup`.

        Raises:
            UserError: It cannot be built, or not for inputs of this shape.

        """
        raise NotImplementedError

    def head_has_bias(self, body: Any) -> bool:
        """Return whether the head on a body that this section made has a bias."""
        return True

    @property
    def weights_file(self) -> str | None:
        """The file of initial weights; None if the body itself reads it."""
        return self.init

    @property
    def is_pretrained(self) -> bool:
        """Whether its features mean something before any training."""
        return self.weights_file is not None

    @property
    def named_weights(self) -> str | None:
        """Folder or name of the pretrained weights that the config names, or None."""
        return None
