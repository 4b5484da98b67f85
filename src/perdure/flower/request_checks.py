"""Checks by which a node refuses requests that its run does not have."""

from __future__ import annotations

from perdure.contract.exchanges import TaskExchanges
from perdure.flower.protocol import BadMessage, NodeRequest


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
