"""Compressors by their names, made from the registry: what a training script calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from . import registry
from .codecs.dense import BF16Codec, DenseCodec
from .compressor import Compressor
from .errors import ConfigError
from .registry import Entry

#: Arguments of every constructor, beside the codec's own.
_COMMON = tuple(
    name
    for name in inspect.signature(Compressor.__init__).parameters
    if name not in ("self", "named_parameters", "codec", "level", "controller")
)


def make(
    entry: Entry,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    compressor: Compressor | None = None,
    **arguments: Any,
) -> Compressor:
    """Build the compressor of a registered codec.

    Args:
        entry: which.
        named_parameters: the model's ``named_parameters()``.
        compressor: an uninitialised instance to fill in (for subclasses).
        arguments: the level by its name, options of the codec, and options of
            :class:`~hvd_greco.compressor.Compressor`.

    Raises:
        ConfigError: an argument that none of them knows, or a value that cannot work.
    """
    options = {*entry.options(), *([entry.level] if entry.level else [])}
    known = options | {name for name in _COMMON if name not in entry.brings}
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"{name}: {entry.public or entry.name} has no such argument; it has "
                f"{', '.join(sorted(known))}"
            )
    own = {name: arguments.pop(name) for name in options if name in arguments}
    made = compressor if compressor is not None else Compressor.__new__(Compressor)
    Compressor.__init__(made, named_parameters, **{**entry.arguments(own), **arguments})
    return made


def constructor(entry: Entry) -> type[Compressor]:
    """The public class of a registered codec: ``greco.TopK`` for ``topk``."""
    level = entry.level

    class Named(Compressor):
        def __init__(
            self,
            named_parameters: Iterable[tuple[str, torch.Tensor]],
            *positional: Any,
            **arguments: Any,
        ) -> None:
            if positional:
                if level is None or len(positional) > 1 or level in arguments:
                    raise ConfigError(
                        f"{entry.public}: takes the named parameters"
                        + (f" and {level}" if level else "")
                        + f" by position, got {len(positional)} more: {positional!r:.60}"
                    )
                arguments[level] = positional[0]
            make(entry, named_parameters, self, **arguments)

    Named.__name__ = Named.__qualname__ = entry.public
    Named.__module__ = "hvd_greco"
    Named.__doc__ = _document(entry)
    Named.__signature__ = _signature(entry)  # type: ignore[attr-defined]
    return Named


def by_public_name(name: str) -> type[Compressor] | None:
    """The constructor that ``hvd_greco.<name>`` stands for, if a codec registered it."""
    if name == "Dense":
        return Dense
    found = {**registry.codecs(), **registry.controllers()}
    entry = next((e for e in found.values() if e.public == name), None)
    return None if entry is None else constructor(entry)


def _document(entry: Entry) -> str:
    lines = [
        inspect.cleandoc(entry.factory.__doc__ or entry.description),
        "",
        "Further arguments are those of :class:`~hvd_greco.Compressor` ("
        "``min_numel``, ``exclude``, ...)."
        if entry.brings
        else "Further arguments are those of :class:`~hvd_greco.Compressor` (``memory``, "
        f"``min_numel``, ``exclude``, ...). The memory is {entry.memory!r} unless you name "
        "another.",
    ]
    return "\n".join(lines)


def _signature(entry: Entry) -> inspect.Signature:
    kind = inspect.Parameter
    parameters = [kind("named_parameters", kind.POSITIONAL_OR_KEYWORD)]
    if entry.level:
        parameters.append(kind(entry.level, kind.POSITIONAL_OR_KEYWORD, default=entry.default))
    own = entry.options().values()
    common = inspect.signature(Compressor.__init__).parameters
    parameters += [p.replace(kind=kind.KEYWORD_ONLY) for p in own]
    parameters += [
        common[name].replace(default=entry.memory) if name == "memory" else common[name]
        for name in _COMMON
        if name not in entry.brings
    ]
    return inspect.Signature(parameters)


class Dense(Compressor):
    """No selection: every entry, in the dtype of your choice on the wire.

    Args:
        named_parameters: the model's ``named_parameters()``.
        wire: ``"native"`` (the gradient's own dtype; bf16 gradients ride in fp32), ``"fp32"``,
            ``"fp16"`` (half the bytes of fp32; a sum over all ranks beyond 65,504 overflows), or
            ``"bf16"`` (half the bytes with fp32's range; two rounds of our own, added in fp32).
        options: see :class:`Compressor`.

    Memory: none with ``"native"``; a copy in the wire's dtype of the layers in flight otherwise.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        wire: str = "native",
        **options: Any,
    ) -> None:
        codec = BF16Codec() if wire == "bf16" else DenseCodec(wire)
        super().__init__(named_parameters, codec, None, memory="none", **options)
