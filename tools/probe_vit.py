"""Evaluate the features of a vision backbone by linear probes on data it was not trained on.

    python tools/probe_vit.py MNIST.npz KMNIST.npz NOTMNIST.npz --card CARD.json

A probe is scikit-learn's logistic regression on standardized features of at most 8,000 training
images, evaluated on all test images. For comparison, the same is done with the pixels, resized as
for the model. scikit-learn's digits are always included. With --card, the results are written into
the card of the weights.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from perdure.models.layers import BodySetup
from perdure.models.ops import ForwardPass
from perdure.models.vit import Vit, VitModel, resize_images

log = logging.getLogger("probe_vit")

Array = np.ndarray[Any, Any]
Parts = tuple[Array, Array, Array, Array]
TRAIN = 8000


def digits() -> Parts:
    """Return scikit-learn's digits as uint8: training and test images, then their labels."""
    data = load_digits()
    x = (data.images * 255 / 16).round().astype(np.uint8)
    parts: Parts = tuple(train_test_split(x, data.target, test_size=0.2, random_state=0))
    return parts


def from_npz(path: Path) -> Parts:
    """Return at most TRAIN training images, drawn with a fixed seed, and all test images."""
    data = np.load(path)
    keep = np.random.default_rng(0).permutation(len(data["y_train"]))[:TRAIN]
    return data["x_train"][keep], data["x_test"], data["y_train"][keep], data["y_test"]


def described(body: Vit, x: Array) -> tuple[Array, Array]:
    """Return the features of gray images [N, H, W], and their pixels at the size of the model."""
    images = torch.from_numpy(x).unsqueeze(1)
    features, pixels = [], []
    with torch.no_grad():
        for part in torch.split(images, 500):
            scaled = resize_images(part.float() / 255, body.size)
            features.append(body.features(body.frozen(), scaled, ForwardPass()))
            pixels.append(scaled.flatten(1))
    return torch.cat(features).numpy(), torch.cat(pixels).numpy()


def probe(train: Array, test: Array, y: Array, y_test: Array) -> float:
    """Return the test accuracy of a logistic regression."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    return round(float(model.fit(train, y).score(test, y_test)), 4)


def main() -> None:
    """Probe on each file, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="*", help="npz files")
    parser.add_argument("--init", help="folder of pretrained weights (default: the bundled ones)")
    parser.add_argument("--card", type=Path, help="write the results into this card")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    body = VitModel(init=args.init).make_body((1, 28, 28), 0, BodySetup())
    figures = {}
    for name, parts in [("digits", digits()), *((p.stem, from_npz(p)) for p in args.data)]:
        x, x_test, y, y_test = parts
        (train, plain), (test, plain_test) = described(body, x), described(body, x_test)
        figures[name] = {
            "features": probe(train, test, y, y_test),
            "pixels": probe(plain, plain_test, y, y_test),
            "train": len(y),
            "test": len(y_test),
        }
        log.info("%s %s", name, json.dumps(figures[name]))
    if args.card:
        card = json.loads(args.card.read_text(encoding="utf-8"))
        card["linear_probes"] = figures
        args.card.write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
