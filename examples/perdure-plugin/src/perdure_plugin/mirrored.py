"""Mirrored streams: in every second task the images are mirrored."""

from __future__ import annotations

from dataclasses import replace

from perdure import Config, StreamConfig
from perdure.core.rng import Rng
from perdure.data.load import load_model_source
from perdure.data.normalization import normalize_source
from perdure.data.streams.stream import Stream, divide_task


class MirroredStream(StreamConfig):
    """The same images in every task, mirrored in every second one."""

    vertical: bool = False
    """Mirror top and bottom instead of left and right."""

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        plain, axis = load_model_source(config, rng), 2 if self.vertical else 3
        sources = [plain, plain.map(lambda part: replace(part, x=part.x.flip(axis)))]
        views = [normalize_source(source, config.data) for source in sources]
        tasks = [
            divide_task(config, views[task % 2], task, ("plain", "mirrored")[task % 2], rng)
            for task in range(self.tasks)
        ]
        return Stream("mirrored", tasks, plain.class_names, plain.shape)
