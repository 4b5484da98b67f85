"""The work of a node's clients in an exchange, what of it leaves the node, and their secrets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.context import Client, Context, Server
from perdure.contract.uploads import ClientResult, Field, Upload, limit_weights, stack_of_one
from perdure.core.files import write_atomic
from perdure.core.rng import system_generator
from perdure.core.trees import Tensors, Tree, to_device
from perdure.federation.messages import BadMessage, NodeRequest, RequestBody, as_bad_message
from perdure.federation.node.policy import NodePolicy, check_exchange
from perdure.federation.node.run import ClientStateHistory
from perdure.privacy.chain import PrivacyChain
from perdure.privacy.mechanism import Place
from perdure.training import client_store as client_states
from perdure.training.collector import finite_clients, with_cap
from perdure.training.engines.engine import client_work
from perdure.training.engines.serial import SerialEngine
from perdure.training.experiment import Experiment
from perdure.training.task_plan import TaskPlan

# ---- Training of one client on a node, and what comes of it


@dataclass(frozen=True)
class FinishedWork:
    """What one client's work in an exchange gave."""

    result: ClientResult
    """Its fields and new state."""
    private: Tensors = field(default_factory=dict)
    """Its private parameters."""
    loss: float | None = None
    """Its mean training loss over the local steps. If None, it did not train."""


def without_client_axis(field: Field) -> Field:
    """Return a field of a stack of one client, without the client axis."""
    return replace(field, value={name: tensor[0] for name, tensor in field.value.items()})


# ---- One client's side of secure sums, stored on its node between two requests
#
# Its secrets come from the operating system, are new for every task and never leave the node. Its
# answers are remembered for the whole task, so it never covers two uploads with the same masks,
# even if the server goes back to a checkpoint and asks again.


class SecAggClientStore:
    """One client in the secure sums of one task, stored in a file."""

    def __init__(self, folder: Path, client: int, task: int) -> None:
        """Load the client, or create it with new keys.

        What it did in earlier tasks stays on record, so that a server which goes back gets no sum
        of other clients than before.
        """
        from perdure.privacy.secagg.client import SecAggClient
        from perdure.privacy.secagg.keys import TaskKeys

        self._path = folder / f"client-{client}-task-{task}.json"
        self._client = SecAggClient(TaskKeys(client))
        if self._path.is_file():
            self._client = SecAggClient.from_tree(json.loads(self._path.read_text("ascii")))
        else:
            self._save()

    def public_key(self) -> bytes:
        """Return the client's public key."""
        return self._client.keys.public

    def upload(self, sum_request: bytes, fields: Upload, weight: float) -> bytes:
        """Return the masked upload, which must not leave the node before `remember`.

        Raises:
            BadMessage: The request would not protect this client.

        """
        try:
            return self._client.upload(sum_request, fields, weight)
        except ValueError as error:
            raise BadMessage(str(error)) from None

    def remember(self, sum_request: bytes, upload: bytes) -> None:
        """Store that an upload leaves the node, so that no other one is made for its sum.

        The reply with the upload must be stored first. If the node dies between the two, it sends
        that reply; the other way around it could send none, since new draws make another upload.

        Raises:
            BadMessage: The client took part in another sum, or with another upload.

        """
        try:
            self._client.remember(sum_request, upload)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()

    def answer(self, request: bytes) -> bytes:
        """Return the answer to a request about an earlier upload.

        Raises:
            BadMessage: The answer would reveal too much.

        """
        try:
            data = self._client.answer(request)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()
        return data

    def _save(self) -> None:
        """Store the client before its answer leaves the node, so that no answer is forgotten."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(self._client.to_tree()).encode("ascii"))


@dataclass(frozen=True)
class SumMasks:
    """A client's masks of one secure sum."""

    store: SecAggClientStore
    """The client."""
    sum_request: bytes
    """The request for the sum."""

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """Return the client's masked upload."""
        return self.store.upload(self.sum_request, fields, weight)


# ---- Secret draws of clients on real nodes, which no one who knows the run's seed can repeat

SecretSource = Callable[[str], torch.Generator]
"""Returns the generator for a purpose."""


class SecretDraws:
    """One client's secret draws in one exchange, from the operating system.

    As with `Client.draw`, the same purpose has the same draws.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    @property
    def were_used(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._states)

    def __call__(self, purpose: str) -> torch.Generator:
        """Return a generator for a purpose."""
        if purpose not in self._states:
            self._states[purpose] = system_generator().get_state()
        generator = torch.Generator()
        generator.set_state(self._states[purpose])
        return generator


# ---- The work of a node's clients in an exchange, and what of it leaves the node


@dataclass(frozen=True)
class ReceivedBroadcast:
    """What all clients of a request receive, checked."""

    context: Context
    """The position in the run."""
    plan: TaskPlan
    """Exchanges, network and data of the task."""
    server: Server
    """The global model, without server state."""
    broadcast: Tree
    """The method's broadcast, with the global parameters."""
    sum_request: bytes = b""
    """The request for a secure sum; empty without secure aggregation."""
    sum_clients: int = 0
    """Number of clients in the sum, by their keys in the request."""
    weight_cap: float = math.inf
    """Number of examples beyond which a client's do not count in the sum."""


@dataclass(frozen=True)
class ClientUpload:
    """What one client sends in an exchange."""

    client: Client
    """The client, as it was before its work."""
    fields: Upload
    """The upload, as the run's privacy changes it."""
    sealed: bytes | None
    """The upload as bytes that hide it. If None, it leaves as it is."""
    loss: float | None
    """Its mean training loss. If None, it did not train."""
    is_secret: bool
    """Whether it depends on draws that cannot be repeated."""


@dataclass(frozen=True)
class ClientExchanges:
    """Runs the clients of a node in the exchanges of one run."""

    experiment: Experiment
    """The objects built from the config, with the node's data."""
    config: Config
    """The config that the node accepted."""
    privacy: PrivacyChain
    """The privacy that it asks for, which is applied here."""
    policy: NodePolicy
    """What the owner of the node allows."""
    folder: Path
    """Where client states are stored."""
    make_secret_source: Callable[[], SecretSource | None] = SecretDraws
    """Makes the source of a client's secret draws in an exchange. If it returns None, they derive
    from the run's seed."""

    @property
    def kept_positions(self) -> int:
        """Positions of the run to which a server may return from a checkpoint."""
        runs = self.config.runs
        return runs.checkpoint_every * runs.keep_checkpoints + 2

    def receive(self, request: NodeRequest, body: RequestBody) -> ReceivedBroadcast:
        """Return the content of a request.

        Raises:
            BadMessage: The run has no such exchange, or the request protects less than its config.

        """
        position, experiment = request.position, self.experiment
        params, buffers, fields = (body.part(k) for k in ("params", "buffers", "broadcast"))
        plan = experiment.plan_task(position.task, params, position.clients_with_data)
        check_exchange(request, plan.exchanges, plan.rounds)
        context = replace(
            plan.at(position.round, position.exchange),
            rounds=position.rounds, attempt=position.attempt,
        )  # fmt: skip
        server = Server(params, buffers, experiment.method.ServerState())
        received = ReceivedBroadcast(context, plan, server, {"params": params, **fields})
        return self._with_sum(request, body, received)

    def _with_sum(
        self, request: NodeRequest, body: RequestBody, received: ReceivedBroadcast
    ) -> ReceivedBroadcast:
        """Add the request for a secure sum, which must be there if the config says so."""
        sums = self.privacy.sums
        if (body.sum_request is not None) != (sums is not None):
            expected = "masked" if sums is not None else "plain"
            raise BadMessage(f"the config of the run asks for {expected} uploads")
        if sums is None or not _communicates(request, received.plan):
            return received
        data = bytes.fromhex(body.sum_request or "")
        context = received.context
        with as_bad_message():
            wanted = sums.check_request(data, context.position, self.policy.min_clients)
        members = len(wanted.public_keys)
        if request.position.exchange:  # parts of a common noise are larger if clients are few
            with_data = min(context.clients_with_data, members)
            context = replace(context, clients_with_data=with_data)
        return replace(
            received, context=context, sum_request=data, sum_clients=members,
            weight_cap=wanted.weight_cap or math.inf,
        )  # fmt: skip

    def run(self, request: NodeRequest, received: ReceivedBroadcast, number: int) -> ClientUpload:
        """Run one client, store its state, and return its protected upload."""
        method = self.experiment.method
        history = ClientStateHistory(self.folder, self.kept_positions)
        sequence_number = request.position.sequence_number
        stored = history.get(number, sequence_number)
        client = with_cap(self._client(received, number, stored), received.weight_cap)
        work = self._work(received, client)
        result, private = work.result, work.private
        self._check_fields(received, result.fields)
        # as in the loop, a client whose upload is not finite keeps its previous state
        if (result.state is not None or private) and _all_finite(result.fields):
            tree = client_states.to_stored_tree(stored, result.state, private, method)
            history.put(number, sequence_number, tree)
        limited = limit_weights(result.fields, client.max_weight)
        fields, sealed = self._protect(request, received, client, limited)
        return ClientUpload(client, fields, sealed, work.loss, self._is_secret(client))

    def _check_fields(self, received: ReceivedBroadcast, upload: Upload) -> None:
        self.policy.check_fields(list(upload))
        if upload and self.privacy.sums is not None and not received.sum_request:
            raise BadMessage("the method sends something in an exchange without communication")

    def _client(self, received: ReceivedBroadcast, number: int, stored: Tree) -> Client:
        tree = to_device(stored, self.experiment.device)
        state, private = client_states.from_stored_tree(tree, self.experiment.method)
        plan, context, server = received.plan, received.context, received.server
        client = plan.client(number, context, server, received.broadcast, state, private)
        return replace(client, secret_source=self.make_secret_source())

    def _work(self, received: ReceivedBroadcast, client: Client) -> FinishedWork:
        """Run one client's work in the exchange."""
        fields, position = self.experiment.method.needs.per_client_fields, client.context.exchange
        if position:
            return FinishedWork(client_work(received.plan.exchanges.at(position), fields, client))
        if client.is_too_small:  # it does nothing and sends nothing
            return FinishedWork(ClientResult())
        server = received.server
        training = received.plan.local_training(
            client.context, server, received.broadcast, fields, losses={}
        )
        new_states: dict[int, tuple[Any, Tensors]] = {}

        def keep(number: int, state: Any, private: Tensors) -> None:
            new_states[number] = (state, private)

        (uploads,) = SerialEngine().train(training, [client], keep)
        state, private = new_states.get(client.id, (None, {}))
        sent = {name: without_client_axis(field) for name, field in uploads.fields.items()}
        _, loss = training.losses[client.id]
        return FinishedWork(ClientResult(sent, state), private, loss)

    def _protect(
        self, request: NodeRequest, received: ReceivedBroadcast, client: Client, upload: Upload
    ) -> tuple[Upload, bytes | None]:
        """Return an upload as the mechanisms of the run change it, and the bytes that seal it."""
        if not upload:
            return upload, None
        context, masks = client.context, None
        if received.sum_request:
            masks = SumMasks(self.sum_client(request, client.id), received.sum_request)
        norms = received.plan.exchanges.clip_norms(context.exchange)
        place = Place(context, received.sum_clients, norms, masks)
        stacked = stack_of_one(client.id, client.weight, upload)
        changed = self.privacy.on_clients(stacked, place)
        fields = {name: without_client_axis(field) for name, field in changed.fields.items()}
        return fields, self.privacy.seal(client.id, fields, client.weight, place)

    def sum_client(self, request: NodeRequest, client: int) -> SecAggClientStore:
        """Return a client's side of the secure sums of a task."""
        return SecAggClientStore(self.folder / "secure", client, request.position.task)

    def _is_secret(self, client: Client) -> bool:
        source = client.secret_source
        return self.privacy.draws or (isinstance(source, SecretDraws) and source.were_used)


def _communicates(request: NodeRequest, plan: TaskPlan) -> bool:
    """Return whether anything may leave the node in an exchange."""
    return request.kind == "train" or plan.exchanges.at(request.position.exchange).communicates


def _all_finite(upload: Upload) -> bool:
    return all(finite_clients(stack_of_one(0, 1.0, upload)))
