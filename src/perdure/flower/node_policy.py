"""What the owner of a node allows: the section `policy` of its node.yaml."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, ValidationError
from pydantic_core import PydanticCustomError

from perdure.config import Config
from perdure.config.base import ConfigSection
from perdure.config.messages import describe
from perdure.config.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Text
from perdure.core.errors import UserError
from perdure.core.files import sha256_file
from perdure.flower.protocol import BadMessage
from perdure.runs.custom_code import custom_kinds

MIN_ROWS = 8
"""Rows of which a real node sends anything, unless its owner says otherwise."""


def _check_any(value: str) -> str:
    if value != "any":
        raise PydanticCustomError("any_or_list", "any, or a list")
    return value


def _tag(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<several>"


AnyOrList = Annotated[
    Annotated[Literal["any"], BeforeValidator(_check_any), Tag("<name>")]
    | Annotated[tuple[Text, ...], Tag("<several>")],
    Discriminator(_tag),
]
"""The word any, or a list of what is allowed."""


class NodePolicy(ConfigSection):
    """What a node requires of a run before it takes part, and what it lets out.

    Example: `policy: {require_secagg: true, min_clients: 4, methods: [fedavg, fot]}`
    """

    require_secagg: bool = False
    """Refuse runs without `privacy.secagg`."""
    min_clients: PositiveInt = 1
    """Refuse runs, and secure sums, of fewer clients."""
    min_rows: NonNegativeInt = MIN_ROWS
    """Send nothing about fewer rows: of a client, or of a class in statistics of classes."""
    min_noise: NonNegativeFloat = 0.0
    """Refuse runs whose `privacy.noise` is smaller, or whose server adds the noise itself."""
    methods: tuple[Text, ...] | None = None
    """Methods that may run. If null, all."""
    fields: tuple[Text, ...] | None = None
    """Fields of uploads that may leave the node. If null, all."""
    code: AnyOrList = ()
    """Code that may be executed beside perdure: SHA-256 of the files of a submission, dotted paths
    of installed packages, or `any`."""
    files: AnyOrList = ()
    """Files that a config may name on this node, beside the folder of `--data`; or `any`."""
    keep_state: bool = False
    """Keep what clients stored after the end of a run, until `perdure federation clean`."""

    def check_run(self, config: Config) -> None:
        """Refuse a run that asks for less protection than this policy.

        Raises:
            BadMessage: The sentence names the key of the policy, the value and what is required.
        """
        privacy, count = config.privacy, config.clients.count
        if self.require_secagg and not privacy.secagg:
            raise _refusal("require_secagg", "privacy.secagg", "true", False)
        if count < self.min_clients:
            raise _refusal("min_clients", "clients.count", f"at least {self.min_clients}", count)
        if self.min_noise and not self._has_noise(config):
            required = f"at least {self.min_noise:g}, with privacy.secagg or mode local"
            raise _refusal("min_noise", "privacy.noise", required, privacy.noise)
        self._check_methods(config)
        self._check_code(config)
        self._check_files(config)

    def _has_noise(self, config: Config) -> bool:
        privacy = config.privacy
        is_local = privacy.secagg or privacy.mode == "local"
        return is_local and privacy.task_end and (privacy.noise or 0.0) >= self.min_noise

    def _check_methods(self, config: Config) -> None:
        parts = [config.method, *(config.method.get("with") or [])]
        for kind in (part["kind"] for part in parts):
            if self.methods is not None and kind not in self.methods:
                raise _refusal("methods", "method.kind", ", ".join(self.methods), kind)

    def _check_code(self, config: Config) -> None:
        """Refuse custom kinds that the owner listed neither by name nor by their file's hash."""
        if self.code == "any":
            return
        for kind in custom_kinds(config):
            if kind not in self.code and not _is_in_files(kind, self.code):
                required = "built in, or listed by its dotted path or by the SHA-256 of its file"
                raise _refusal("code", "kind", required, kind)

    def _check_files(self, config: Config) -> None:
        """Refuse a run that would read files of this machine other than the node's data."""
        if self.files == "any":
            return
        if config.federation is None:
            raise _refusal("files", "federation", "a section that says what nodes agree on", None)
        weights = config.model.init
        if weights not in (None, "random") and weights not in self.files:
            raise _refusal("files", "model.init", "one of the listed files", weights)

    def check_fields(self, names: list[str]) -> None:
        """Refuse an upload with other fields than the owner lets out.

        Raises:
            BadMessage: A field is not listed.
        """
        for name in names:
            if self.fields is not None and name not in self.fields:
                raise _refusal("fields", "upload", ", ".join(self.fields), name)


TRIAL = NodePolicy(min_rows=0, code="any", files="any")
"""The policy of nodes that run on the machine of the person who started the run."""


def _is_in_files(kind: str, hashes: tuple[str, ...]) -> bool:
    """Return whether the module of a dotted path, and its packages, are files with these hashes."""
    names = kind.split(".")[:-1]
    for end in range(1, len(names) + 1):  # a package is imported to find its modules: check first
        spec = importlib.util.find_spec(".".join(names[:end]))
        origin = Path(str(spec.origin)) if spec is not None else Path()
        if not origin.is_file() or sha256_file(origin) not in hashes:
            return False
    return bool(names)


def read_policy(values: Mapping[str, Any], path: str) -> NodePolicy:
    """Return the policy of a node.yaml.

    Args:
        values: The content of the file.
        path: Its path, for error messages.

    Raises:
        UserError: The section has an unknown key or a wrong value.
    """
    policy = values.get("policy")
    try:
        return NodePolicy.model_validate({} if policy is None else policy)
    except ValidationError as error:
        sentence = describe(error.errors()[0], section=NodePolicy, prefix="policy")
        raise UserError(f"{path}: {sentence}") from None


def _refusal(key: str, name: str, required: str, value: object) -> BadMessage:
    return BadMessage(f"policy.{key} of this node: {name} must be {required}, got {value!r}")
