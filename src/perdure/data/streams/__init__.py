"""The order in which tasks arrive: one file per kind of stream."""

from perdure.data.streams.build import EvalGroup, Stream, Task, make_stream, resolve_normalization

__all__ = ["EvalGroup", "Stream", "Task", "make_stream", "resolve_normalization"]

from perdure.config.stream import StreamConfig
from perdure.core.registry import Registry

STREAMS: Registry[StreamConfig] = Registry(
    key="stream.kind",
    base=StreamConfig,
    base_name="perdure.StreamConfig",
    group="perdure.streams",
    builtin={
        "permuted": "perdure.data.streams.permuted.PermutedStream",
        "split": "perdure.data.streams.split.SplitStream",
        "domains": "perdure.data.streams.domains.DomainStream",
        "pool": "perdure.data.streams.pool.PoolStream",
        "given": "perdure.data.streams.given.GivenStream",
    },
)
