"""Mutations of messages, aware of their structure, and campaigns that read mutated messages.

`PERDURE_FUZZ` is the number of messages per campaign. Message k of a campaign is the same on every
machine, so that a failure can be repeated by its number.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import resource
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from perdure.core.trees import decode, encode

MESSAGES = int(os.environ.get("PERDURE_FUZZ", "1250"))
MEMORY_MB = 400
"""Bound on the growth of the process in a campaign, whose messages have some kilobytes."""
_PROGRESS = 10_000
"""Messages after which a campaign prints its figures."""
FOUND: list[dict[str, Any]] = []
"""The counts of campaigns that have ended, for the results file of `make fuzz`."""


# ---- values that no honest sender sends


def strange_value(rng: random.Random) -> Any:
    """Return a value of a JSON type, often one at the edge of its range."""
    nested: Any = 0
    for _ in range(rng.choice((1, 70, 150))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return rng.choice([
        None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 10**18, 10**400, -(10**400),
        0.5, -0.0, 1e-320, 1e30, 3e38, 1e300, 1e308, float("nan"), float("inf"), float("-inf"),
        "", "0", "１２", "1_0", " 1", "-1", "nan", "x" * 5000, "\x1b[31m\n", "\ud800", "__tensor__",
        [], {}, [[]], {"": {}}, [0] * 3000, {"a": None}, nested,
    ])  # fmt: skip


def strange_tensor(rng: random.Random) -> torch.Tensor:
    """Return a tensor of any type and shape; some have extents beyond all memory, and no values."""
    shape = rng.choice([(), (0,), (1,), (3,), (2, 2), (33,), (1 << 20, 0), (0, 1 << 40), (1,) * 12])
    dtype = rng.choice([
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32,
        torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
    ])  # fmt: skip
    fill = rng.choice([0.0, 1.0, -1.0, 1e30, 3e38, float("nan"), float("inf")])
    if not dtype.is_floating_point:
        fill = min(max(-1.0, fill if fill == fill else 0.0), 1.0)
    return torch.full(shape, fill).to(dtype)


def changed_tensor(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another one, with some of its values or its form changed."""
    value = tensor.clone()
    how = rng.randrange(6)
    if how == 0 and value.numel():
        flat = value.flatten()
        bad = rng.choice([float("nan"), float("inf"), 3e38, -1e30, 1e-45, 0.0])
        flat[rng.randrange(len(flat))] = bad if value.is_floating_point() else rng.randrange(127)
        return flat.view(value.shape)
    if how == 1 and value.dtype.itemsize > 1:  # PyTorch multiplies no numbers of 8 bits
        return value * rng.choice([0, -1, 2])
    if how == 2:
        return value.flatten()
    if how == 3:
        return value.unsqueeze(rng.randrange(value.dim() + 1))
    if how == 4 and value.dim():
        return value.narrow(0, 0, len(value) // 2).clone()
    return value.double() if value.dtype != torch.float64 else value.float()


# ---- mutations of trees


def mutated_tree(rng: random.Random, tree: Any) -> Any:
    """Return a tree with one to three of its parts changed, removed, added or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return tree
        parent, key = rng.choice(places)
        _change(rng, parent, key, places)
    return tree


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
            yield tree, key
            yield from _places(value)


def _change(rng: random.Random, parent: Any, key: Any, places: list[Any]) -> None:
    how, value = rng.randrange(8), parent[key]
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "more", "0", "-1", "x" * 2000, str(key) + " "])] = value
    elif how == 1:
        parent.insert(rng.randrange(len(parent) + 1), value)
    elif how == 2:
        other, name = rng.choice(places)
        if name in other if isinstance(other, dict) else name < len(other):
            parent[key] = copy.deepcopy(other[name])
    elif how == 3 and isinstance(parent, dict):
        parent[rng.choice(["more", "1", "routed", "value", "weight"])] = parent.pop(key)
    elif how in (4, 5) and isinstance(value, torch.Tensor):
        parent[key] = changed_tensor(rng, value)
    elif how == 6:
        parent[key] = strange_tensor(rng)
    else:
        parent[key] = _nearby(rng, value)


def _nearby(rng: random.Random, value: Any) -> Any:
    """Return a value of the same type that is a little different, or a strange one."""
    if type(value) in (int, float) and abs(value) < 1e300 and rng.random() < 0.5:
        return rng.choice([value + 1, value - 1, -value, float(value), value * 2, str(value)])
    if isinstance(value, str) and value and rng.random() < 0.5:
        spot = rng.randrange(len(value))
        return value[:spot] + rng.choice("0aZ~é\x00") + value[spot + 1 :]
    return strange_value(rng)


# ---- mutations of bytes


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with some of them changed, removed, repeated or cut off."""
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if not broken:
            break
        spot, size = rng.randrange(len(broken)), rng.choice((1, 1, 4, 30))
        how = rng.randrange(5)
        if how == 0:
            broken[spot] ^= 1 << rng.randrange(8)
        elif how == 1:
            broken[spot : spot + size] = rng.randbytes(size)
        elif how == 2:
            del broken[spot : spot + size]
        elif how == 3:
            broken[spot:spot] = broken[spot : spot + size]
        elif rng.random() < 0.2:
            del broken[spot:]
    return bytes(broken)


def mutated_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Return an encoded tree with a header that lies: types, shapes, places, repeated names."""
    size = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + size], data[8 + size :]
    how = rng.randrange(4)
    if how == 0:
        text = json.dumps(mutated_tree(rng, json.loads(header)), default=str).encode()
    elif how == 1:
        text = header.rstrip()[:-1] + b"," + header.lstrip()[1:]  # every name twice
    elif how == 2:
        text = mutated_bytes(rng, header)
    else:
        entries = json.loads(header)
        skeleton = mutated_tree(rng, json.loads(entries["__metadata__"]["tree"]))
        entries["__metadata__"]["tree"] = json.dumps(skeleton, default=str)
        text = json.dumps(entries).encode()
    length = (
        len(text) if rng.random() < 0.9 else rng.choice([0, 1, 2**40, 2**64 - 1, len(text) + 1])
    )
    return length.to_bytes(8, "little") + text + rest


def mutated_message(rng: random.Random, data: bytes) -> bytes:
    """Return an encoded tree after any of the mutations."""
    how = rng.random()
    if how < 0.15:
        return mutated_bytes(rng, data)
    if how < 0.3:
        return mutated_safetensors(rng, data)
    try:
        return encode(mutated_tree(rng, decode(data)))
    except Exception:  # a tree that cannot be encoded
        return mutated_bytes(rng, data)


def mutated_json(rng: random.Random, data: str) -> str:
    """Return a JSON text after any of the mutations."""
    how = rng.random()
    if how < 0.15:
        return mutated_bytes(rng, data.encode()).decode("utf-8", "replace")
    if how < 0.2:
        return data[:-1] + "," + data[1:]  # every key twice
    if how < 0.25:
        depth = rng.choice((10, 1000, 100_000))
        return data.replace("[]", "[" * depth + "]" * depth, 1)
    return json.dumps(mutated_tree(rng, json.loads(data)), default=str)


# ---- campaigns


def campaign(
    name: str,
    corpus: Sequence[Any],
    mutate: Callable[[random.Random, Any], Any],
    read: Callable[[random.Random, Any], Any],
    allowed: tuple[type[Exception], ...] = (),
    messages: int = MESSAGES,
) -> int:
    """Read mutated messages, and return how many of them were refused.

    Fails with the number and traceback of the first messages that raise anything else than
    `allowed`, or if the process has grown by more than `MEMORY_MB`.
    """
    refused, failures, before = 0, [], _peak_mb()
    logging.disable()  # thousands of warnings
    for number in range(messages):
        rng = random.Random(f"{name} {number}")
        message = mutate(rng, rng.choice(corpus))
        try:
            read(rng, message)
        except allowed:
            refused += 1
        except Exception:
            failures.append(f"{name} {number}\n{traceback.format_exc(limit=-4)}")
        if number + 1 == messages or (number + 1) % _PROGRESS == 0:
            found = f"{refused} refused, {len(failures)} failures, {_peak_mb() - before} MB"
            print(f"{name}: {number + 1} messages, {found}", flush=True)
    logging.disable(logging.NOTSET)
    FOUND.append({
        "kind": name, "messages": messages, "refused": refused, "surprises": len(failures),
        "mb": _peak_mb() - before,
    })  # fmt: skip
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:5])
    assert _peak_mb() - before < MEMORY_MB
    return refused


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
