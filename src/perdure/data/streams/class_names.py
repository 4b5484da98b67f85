"""Classes of several sources that share one label space: those of one name are one class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from perdure.core.errors import UserError
from perdure.data.source import Examples, Source


def unify_classes(sources: Sequence[Source]) -> list[Source]:
    """Return sources with one list of classes, joined by name, in the order of their appearance.

    Sources whose classes have no names, only numbers, keep their labels.

    Raises:
        UserError: A source has no class in common with those before it, or none with a name.
    """
    named = [source for source in sources if not _is_unnamed(source)]
    if len({source.class_names for source in named}) < 2:
        return list(sources)
    names: dict[str, int] = {}
    for source in sources:
        if _is_unnamed(source) or (names and not names.keys() & set(source.class_names)):
            raise _nothing_in_common(source, sources[0])
        for name in source.class_names:
            names.setdefault(name, len(names))
    return [relabel(source, names) for source in sources]


def append_classes(
    source: Source, known: tuple[str, ...], separate: bool, key: str
) -> tuple[Source, tuple[str, ...]]:
    """Return a source with its labels in a label space, and the space with its new classes.

    Args:
        source: The source.
        known: The names of the classes so far.
        separate: Whether all classes of the source are new, whatever their names.
        key: Key of the source in error messages.

    Raises:
        UserError: The classes so far have names, and those of the source only numbers.
    """
    if separate:
        names = tuple(f"{source.name}/{name}" for name in source.class_names)
        source = replace(source, class_names=names)
    elif _is_unnamed(source) and known != tuple(str(label) for label in range(len(known))):
        shown = ", ".join(known[:5])
        raise UserError(
            f"{key}: must name its classes as the run does ({shown}), got numbers; "
            "or labels must be 'separate', if all of them are new"
        )
    labels = {name: label for label, name in enumerate(known)}
    for name in source.class_names:
        labels.setdefault(name, len(labels))
    return relabel(source, labels), tuple(labels)


def _is_unnamed(source: Source) -> bool:
    return source.class_names == tuple(str(label) for label in range(len(source.class_names)))


def _nothing_in_common(source: Source, first: Source) -> UserError:
    shown = "; ".join(f"{s.name}: {', '.join(s.class_names[:5])}" for s in (first, source))
    return UserError(
        f"stream.labels: must be 'separate' for domains without a common class name ({shown}), "
        "got 'shared'"
    )


def relabel(source: Source, names: Mapping[str, int]) -> Source:
    """Return a source with the classes `names`, in whose order their labels are.

    Targets that are numbers stay as they are.
    """
    if source.train.y.is_floating_point():
        return source
    labels = torch.tensor([names[name] for name in source.class_names])

    def changed(rows: Examples) -> Examples:
        return replace(rows, y=labels[rows.y])

    train, test = changed(source.train), changed(source.test)
    return replace(source, train=train, test=test, class_names=tuple(names))
