"""Methods that send wrong uploads or hang on purpose."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from perdure.contract import ClientResult, Method, Sum, Train


@dataclass(frozen=True)
class Misbehaving(Method):
    """FedAvg whose client 2 uploads something wrong, in another way in each round."""

    def exchanges(self, context):
        return [Train(make_upload=self.answer)]

    def answer(self, client, local):
        if client.id != 2:
            return ClientResult()
        first = next(iter(local.update))
        match client.context.round:
            case 0:
                broken = local.update | {first: local.update[first] * float("nan")}
                return ClientResult({"update": Sum(broken)})
            case 1:
                replace_sent_values({first: torch.zeros(3, 3)})
            case 2:
                replace_sent_values({"huge": torch.zeros(20_000_000)})
            case 3:
                import perdure.federation.messages as protocol

                protocol.encode = lambda tree: b"garbage"
            case 4:
                raise ValueError("this client breaks down")
        return ClientResult()


def replace_sent_values(values):
    """Let the upload leave the node with other values than were checked there."""
    import perdure.federation.node.worker as node

    honest = node.upload_tree

    def changed(upload):
        tree = honest(upload)
        tree["update"]["value"] = {**tree["update"]["value"], **values}
        return tree

    node.upload_tree = changed


@dataclass(frozen=True)
class Slow(Method):
    """FedAvg whose client 1 takes very long in round 1; a file is created when it begins."""

    flag: str
    seconds: float

    def exchanges(self, context):
        return [Train(make_upload=self.wait)]

    def wait(self, client, local):
        if client.id == 1 and client.context.round == 1 and not Path(self.flag).exists():
            Path(self.flag).touch()
            time.sleep(self.seconds)
        return ClientResult()
