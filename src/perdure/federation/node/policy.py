"""What the owner of a node allows, and the checks by which a node refuses requests."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, ValidationError
from pydantic_core import PydanticCustomError

from perdure.config import Config
from perdure.config.section import Text
from perdure.config.sentences import describe
from perdure.contract.exchanges import TaskExchanges
from perdure.core.errors import UserError
from perdure.core.files import sha256_file
from perdure.deploy.custom_code import custom_kinds
from perdure.federation.messages import BadMessage, NodeRequest, as_bad_message
from perdure.federation.node.run import MOST_RELEASES
from perdure.privacy.chain import OwnerPolicy, make_chain
from perdure.privacy.secure_sums import count_survivors

# ---- What the owner of a node allows: the section `policy` of its node.yaml


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


class NodePolicy(OwnerPolicy):
    """What a node requires of a run before it takes part, and what it lets out.

    Example: `policy: {require_secagg: true, min_clients: 4, methods: [fedavg, fot]}`
    """

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
        unmet = make_chain(config, simulated=False).unmet(self)
        if unmet is not None:
            raise _refusal(*unmet)
        self._check_methods(config)
        self._check_code(config)
        self._check_files(config)

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


# ---- Checks by which a node refuses requests that its run does not have


def check_clients(request: NodeRequest, node: int, nodes: int, count: int) -> None:
    """Refuse requests for clients of other nodes.

    Raises:
        BadMessage: A client is not at this node, or the run does not have that many.

    """
    if request.position.clients_with_data > count:
        with_data = request.position.clients_with_data
        raise BadMessage(f"clients with data: must be at most {count}, got {with_data}")
    for client in request.clients:
        if not 0 <= client < count or client % nodes != node:
            raise BadMessage(f"client {client} is not at node {node}")


def check_current_task(request: NodeRequest, current: int) -> None:
    """Refuse requests about a task that is not current.

    Raises:
        BadMessage: The request skips a task, is about another one, or tests on later ones.

    """
    task = request.position.task
    if request.kind == "announce" and task > current + 1:
        raise BadMessage(f"task {task + 1} was announced after task {current + 1}")
    if request.kind != "announce" and task != current:
        raise BadMessage(f"task {task + 1} is not current, task {current + 1} is")
    if any(not 0 <= number <= current for number in request.tasks):
        raise BadMessage(f"a test on tasks after task {current + 1} is refused")


def check_exchange(request: NodeRequest, exchanges: TaskExchanges, rounds: int) -> None:
    """Refuse rounds and exchanges that the method does not declare for the task.

    Raises:
        BadMessage: There is no such round or exchange.

    """
    position = request.position
    if position.rounds != rounds or not _is_declared(request, exchanges, rounds):
        raise BadMessage(
            f"{request.kind} {position.exchange} at round {position.round} of {position.rounds} "
            f"is no part of task {position.task + 1}"
        )


def check_releases(request: NodeRequest, others: int) -> None:
    """Refuse one more protected reply at a place of the run.

    Raises:
        BadMessage: There were so many that more would show what noise and sketches hide.

    """
    if others >= MOST_RELEASES:
        position = request.position
        raise BadMessage(
            f"{others} other replies to {request.kind} {position.exchange} at round "
            f"{position.round} of task {position.task + 1} left this node, which is the most"
        )


def check_survivors(data: bytes, min_clients: int) -> None:
    """Refuse to open a sum from which so many clients dropped out that it is of too few.

    Raises:
        BadMessage: It is no such request, or fewer clients are left.

    """
    with as_bad_message():
        left = count_survivors(data)
    if left < min_clients:
        raise BadMessage(
            f"policy.min_clients of this node: a secure sum must be of at least {min_clients} "
            f"clients, {left} are left"
        )


def _is_declared(request: NodeRequest, exchanges: TaskExchanges, rounds: int) -> bool:
    position = request.position
    if request.kind == "train":
        return position.exchange == 0 and position.round < rounds
    try:
        exchange = exchanges.at(position.exchange)
    except IndexError:
        return False
    expected_round = rounds if position.exchange > 0 else 0
    return exchange.participants != "none" and position.round == expected_round
