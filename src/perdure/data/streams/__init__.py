"""The order in which tasks arrive: one file per kind of stream."""

from perdure.data.streams.build import EvalGroup, Stream, Task, make_stream, resolve_normalization

__all__ = ["EvalGroup", "Stream", "Task", "make_stream", "resolve_normalization"]
