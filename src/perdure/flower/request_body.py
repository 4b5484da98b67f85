"""What a node makes of a request that it cannot serve: a refusal, whatever the server has sent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from perdure.core.errors import RunError, UserError
from perdure.core.received import one_line, read_mapping, read_tensors, read_text
from perdure.core.trees import Tree
from perdure.flower.protocol import BadMessage, as_bad_message

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def check_body(tree: Tree) -> None:
    """Refuse a body whose parts have another type than those of a server.

    Raises:
        BadMessage: The model is not made of tensors, or a sum request is not hexadecimal.
    """
    with as_bad_message():
        for key in ("params", "buffers"):
            read_tensors(key, tree.get(key, {}))
        for key in ("broadcast", "state"):
            read_mapping(key, tree.get(key, {}))
        bytes.fromhex(read_text("sum_request", tree.get("sum_request", ""), 1 << 30))


def refuses_bad_requests(serve: Callable[P, T]) -> Callable[P, T]:
    """Return a function that refuses requests in which a method or a network fails.

    What a broadcast must hold is known to the method alone, which may raise anything. What was
    raised is logged here and not sent, since it may tell about data: `Target 7 is out of bounds`.
    Mistakes of the node's owner, such as files that cannot be read, are raised as they are.
    """

    @wraps(serve)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return serve(*args, **kwargs)
        except (BadMessage, UserError, OSError):
            raise
        except RunError as error:
            raise BadMessage(one_line(str(error))) from error
        except Exception as error:
            log.warning("a request cannot be served", exc_info=True)
            raise BadMessage("the request cannot be served; the node's log says why") from error

    return refusing
