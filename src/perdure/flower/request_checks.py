"""Checks by which a node refuses requests that its run does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perdure.config import Config
from perdure.contract.exchanges import TaskExchanges
from perdure.flower.protocol import BadMessage, NodeRequest
from perdure.flower.sent_replies import MOST_RELEASES
from perdure.privacy.secagg.transport import min_survivors

if TYPE_CHECKING:
    from perdure.privacy.secagg.messages import SumRequest


def check_clients(request: NodeRequest, node: int, nodes: int, count: int) -> None:
    """Refuse requests for clients of other nodes.

    Args:
        request: The request.
        node: Index of this node.
        nodes: Number of nodes.
        count: Number of clients in the run.

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

    Args:
        request: The request.
        current: The last task that was announced, or -1.

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

    Args:
        request: A request to train or to run another exchange.
        exchanges: The exchanges of the task.
        rounds: The rounds of the task.

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

    Args:
        request: A request to train or to run another exchange.
        others: How many other replies left the node at its place.

    Raises:
        BadMessage: There were so many that more would show what noise and sketches hide.
    """
    if others >= MOST_RELEASES:
        position = request.position
        raise BadMessage(
            f"{others} other replies to {request.kind} {position.exchange} at round "
            f"{position.round} of task {position.task + 1} left this node, which is the most"
        )


def check_sum_request(
    data: bytes, request: NodeRequest, config: Config, min_clients: int
) -> SumRequest:
    """Refuse a sum that is not the one which the accepted config asks for.

    Args:
        data: The encoded request for a sum.
        request: The request to train or to run another exchange.
        config: The config that the node accepted.
        min_clients: Smallest number of clients that the node's owner allows in a sum.

    Returns:
        The request: the number of clients whose keys are in the sum decides the noise of each, and
        its cap the weight.

    Raises:
        BadMessage: The sum differs from the config in its place, its format or its clients.
    """
    from perdure.privacy.secagg.messages import MalformedMessage, SumRequest
    from perdure.privacy.secagg.wire import decode

    try:
        wanted = decode(data, SumRequest)
    except MalformedMessage as error:
        raise BadMessage(f"sum request: {error}") from None
    privacy, position, count = config.privacy, request.position, len(wanted.public_keys)
    if wanted.session.position != (position.task, position.round, position.exchange):
        raise BadMessage("sum request: it belongs to another round or exchange")
    form = wanted.fixed_point
    got = (form.bits, form.precision, wanted.single_message)
    if got != (privacy.bits, privacy.precision, privacy.single_message):
        raise BadMessage(
            "sum request: bits, precision and single_message must be those of the config, "
            f"got {got}"
        )
    if form.clients != count:  # it decides which values are too large to be sent
        raise BadMessage(f"sum request: the format must be for {count} clients, got {form.clients}")
    if not all(0 <= client < config.clients.count for client in wanted.public_keys):
        raise BadMessage(f"sum request: clients must be below {config.clients.count}")
    if count < min_clients or wanted.threshold < min_survivors(count, privacy.threshold):
        raise BadMessage(
            f"sum request: must need at least {min_survivors(count, privacy.threshold)} of at "
            f"least {min_clients} clients, got {wanted.threshold} of {count}"
        )
    cap = wanted.weight_cap
    if cap is not None and (cap < 1 or config.federation is None):
        expected = "at least 1, in a federation with local data"
        raise BadMessage(f"sum request: weight_cap: must be {expected}, got {cap:g}")
    return wanted


def check_survivors(data: bytes, min_clients: int) -> None:
    """Refuse to open a sum from which so many clients dropped out that it is of too few.

    Args:
        data: An encoded request about a sum.
        min_clients: Smallest number of clients that the node's owner allows in a sum.

    Raises:
        BadMessage: It is no such request, or fewer clients are left.
    """
    from perdure.privacy.secagg.messages import DropoutRequest, MalformedMessage, UnmaskRequest
    from perdure.privacy.secagg.wire import decode_either

    try:
        left = len(set(decode_either(data, DropoutRequest, UnmaskRequest).survivors))
    except MalformedMessage as error:
        raise BadMessage(f"secure sum: {error}") from None
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
