"""Pretrain the small vision transformer that is bundled with the library.

    python tools/pretrain_vit.py LETTERS.npz --out src/perdure/models/bundled

The npz has x_train, y_train, x_test and y_test: uint8 images of 28x28 and their labels. The
script writes the weights with the names of Hugging Face's ViTModel, and a card with their origin.

To make the features useful for unseen classes, each image is rotated by 0, 90, 180 or 270 degrees,
and each rotation of a letter is a separate class: features that distinguish four times as many
classes retain more of the images. Images are also shifted, rotated by some degrees, scaled, sheared
and partly erased.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from perdure.core.rng import Rng
from perdure.models.ops import ForwardPass
from perdure.models.pretrained import to_huggingface
from perdure.models.transformer import Encoder
from perdure.models.vit import Vit

log = logging.getLogger("pretrain_vit")

SIZE, PATCH, WIDTH, DEPTH, HEADS, HIDDEN = 28, 7, 96, 6, 4, 192
TURNS = 4
BATCH, LR, DECAY, WARM_UP = 64, 1e-3, 0.05, 200
NAME = "letters_vit"
Params = dict[str, Tensor]


def model() -> Vit:
    """Return the architecture."""
    return Vit(Encoder(WIDTH, DEPTH, HEADS, HIDDEN, pre_norm=True), 1, SIZE, PATCH)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return randomly transformed and partly erased images, float [batch, 1, H, W] from 0 to 1."""
    count = len(x)

    def draw(bound: float) -> Tensor:
        return (torch.rand(count, generator=generator) * 2 - 1) * bound

    angle, scale, shear = draw(math.radians(15)), 1 + draw(0.15), draw(0.2)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    rows = [cos, shear - sin, draw(0.15), sin, cos, draw(0.15)]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), list(x.shape), False)
    return erased(F.grid_sample(x, grid, align_corners=False), generator)


def erased(x: Tensor, generator: torch.Generator) -> Tensor:
    """Erase a square of 6 to 10 pixels per side in half of the images."""
    count, side = len(x), x.shape[-1]
    top, left = (torch.randint(0, side - 6, (count, 1), generator=generator) for _ in range(2))
    extent = torch.randint(6, 11, (count, 1), generator=generator)
    lost = torch.rand(count, 1, generator=generator) < 0.5
    lines = torch.arange(side)
    rows = (lines >= top) & (lines < top + extent) & lost
    columns = (lines >= left) & (lines < left + extent)
    return x.masked_fill((rows[:, :, None] & columns[:, None, :]).unsqueeze(1), 0.0)


def turned(x: Tensor, y: Tensor, generator: torch.Generator, classes: int) -> tuple[Tensor, Tensor]:
    """Rotate each image by 0 to 3 quarter turns; every rotation of a letter is a separate class."""
    turns = torch.randint(0, TURNS, (len(x),), generator=generator)
    every = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(TURNS)])
    return every[turns, torch.arange(len(x))], y + classes * turns


def batches(x: Tensor, y: Tensor, epochs: int, rng: Rng) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the augmented batches of all epochs."""
    classes = int(y.max()) + 1
    for epoch in range(epochs):
        generator = rng.torch_generator("pretrain", epoch)
        order = torch.randperm(len(x), generator=generator)
        for rows in torch.split(order[: len(x) // BATCH * BATCH], BATCH):
            images, labels = turned(x[rows].float() / 255, y[rows], generator, classes)
            yield augmented(images, generator), labels


def rate(step: int, steps: int) -> float:
    """Return the fraction of the learning rate: linear warm-up, then a cosine to zero."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def train(body: Vit, x: Tensor, y: Tensor, epochs: int, rng: Rng) -> tuple[Params, Params]:
    """Train; return the parameters of the backbone, and of the head over rotated letters."""
    classes = TURNS * (int(y.max()) + 1)
    params, _ = body.init(rng.torch_generator("init"))
    head = {"weight": torch.zeros(classes, WIDTH), "bias": torch.zeros(classes)}
    leaves = [value.requires_grad_() for value in (*params.values(), *head.values())]
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=DECAY)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    shown, began = 0.0, time.perf_counter()
    for step, (images, labels) in enumerate(batches(x, y, epochs, rng), start=1):
        features = body.features(params, images, ForwardPass())
        loss = F.cross_entropy(F.linear(features, head["weight"], head["bias"]), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
        schedule.step()
        shown += float(loss.detach())
        if step % 100 == 0:
            seconds = time.perf_counter() - began
            log.info("step %d of %d, loss %.3f, %.0f s", step, steps, shown / 100, seconds)
            shown = 0.0
    return {n: v.detach() for n, v in params.items()}, {n: v.detach() for n, v in head.items()}


def features(body: Vit, params: Params, x: np.ndarray[Any, Any]) -> Tensor:
    """Return the features of images, uint8 [N, H, W]."""
    images = torch.from_numpy(x).unsqueeze(1)
    with torch.no_grad():
        parts = [
            body.features(params, p.float() / 255, ForwardPass()) for p in torch.split(images, 1000)
        ]
    return torch.cat(parts)


def accuracy(body: Vit, params: Params, head: Params, data: Any) -> float:
    """Return the accuracy on upright test letters, among the 26 upright classes."""
    outputs = F.linear(features(body, params, data["x_test"]), head["weight"], head["bias"])
    classes = len(head["bias"]) // TURNS
    correct = outputs[:, :classes].argmax(1) == torch.from_numpy(data["y_test"]).long()
    return float(correct.float().mean())


def write(folder: Path, body: Vit, params: Params, origin: dict[str, Any]) -> None:
    """Write the weights and their card."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.position_embeddings": (1, body.tokens, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 1, PATCH, PATCH),
    }
    save_file(to_huggingface(params, shapes, "vit", DEPTH), folder / f"{NAME}.safetensors")
    config = {
        "model_type": "vit",
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "hidden_act": "gelu",
        "layer_norm_eps": body.encoder.eps,
        "image_size": SIZE,
        "patch_size": PATCH,
        "num_channels": 1,
        "qkv_bias": True,
    }
    card = {"config": config, "origin": origin}
    (folder / f"{NAME}.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, evaluate and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="npz of letters")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and card")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="use this many training images only")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    data, body, began = np.load(args.data), model(), time.process_time()
    x = torch.from_numpy(data["x_train"]).unsqueeze(1)[: args.limit]
    y = torch.from_numpy(data["y_train"]).long()[: args.limit]
    params, head = train(body, x, y, args.epochs, Rng(args.seed))
    origin = {
        "data": args.data.name,
        "images": len(x),
        "script": "tools/pretrain_vit.py",
        "command": f"python tools/pretrain_vit.py {args.data.name} --out {args.out}"
        f" --epochs {args.epochs} --seed {args.seed}"
        + (f" --limit {args.limit}" if args.limit else ""),
        "seed": args.seed,
        "epochs": args.epochs,
        "parameters": sum(value.numel() for value in params.values()),
        "test_accuracy_upright_letters": round(accuracy(body, params, head, data), 4),
        "cpu_seconds_on_one_thread": round(time.process_time() - began),
        "licence": "Apache-2.0, as the library; EMNIST is a work of NIST in the public domain",
    }
    write(args.out, body, params, origin)
    log.info("%s", json.dumps(origin, indent=2))


if __name__ == "__main__":
    main()
