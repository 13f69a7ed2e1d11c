"""Every method by its name: what the command line, the demo and the benchmarks can ask for.

Importable without torch or Horovod, so that ``--help`` and a check of arguments need neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .config import check_count, check_density
from .errors import ConfigError

if TYPE_CHECKING:
    import torch

    from .compressor import Compressor

Parser = Callable[[str, str], object]


def _number(argument: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{argument}: {text!r} is not a number") from None


def _density(argument: str, text: str) -> float:
    return check_density(argument, _number(argument, text))


def _count(argument: str, text: str) -> int:
    number = _number(argument, text)
    return check_count(argument, int(number) if number == int(number) else number)


def _flag(argument: str, text: str) -> bool:
    values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in values:
        raise ConfigError(f"{argument}: {text!r} is neither true nor false")
    return values[text.lower()]


@dataclass(frozen=True)
class Method:
    """One entry of the table.

    Attributes:
        name: what users type.
        constructor: class in :mod:`hvd_greco.constructors`.
        description: one line.
        fixed: arguments that make this entry what it is.
        options: further arguments that a spec may set, with their parsers; the first is the one
            that a bare value sets (``topk:0.001``).
    """

    name: str
    constructor: str
    description: str
    fixed: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, Parser] = field(default_factory=dict)

    @property
    def default(self) -> str:
        """The spec with every option at its default."""
        return self.name


@dataclass(frozen=True)
class Spec:
    """A method and its options, as written: ``topk:density=0.001,min_numel=4096``."""

    method: Method
    options: Mapping[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text


_SPARSE: Mapping[str, Parser] = {
    "density": _density, "min_numel": _count, "error_feedback": _flag, "seed": _count,
}  # fmt: skip
_DENSE: Mapping[str, Parser] = {"min_numel": _count}

_TABLE = (
    Method("dense", "Dense", "every entry, fp32: stock Horovod", options=_DENSE),
    Method("fp16", "Dense", "every entry, 2 bytes each", {"wire": "fp16"}, _DENSE),
    Method("bf16", "Dense", "every entry, 2 bytes with fp32's range", {"wire": "bf16"}, _DENSE),
    Method("topk", "TopK", "largest entries of each rank, error feedback", options=_SPARSE),
    Method("randomk", "RandomK", "the same random entries on all ranks", options=_SPARSE),
)


def available() -> dict[str, Method]:
    """All methods by name, in the order in which tables show them."""
    return {method.name: method for method in _TABLE}


def all_specs() -> list[Spec]:
    """What ``--methods all`` means: every method at its defaults."""
    return [parse(method.default) for method in _TABLE]


def parse(text: str) -> Spec:
    """Read a spec: a name, optionally ``:value`` or ``:option=value,option=value``.

    Raises:
        ConfigError: unknown name or option, or a value that cannot be.
    """
    name, _, rest = text.strip().partition(":")
    method = available().get(name)
    if method is None:
        raise ConfigError(f"methods: {name!r} is none of {', '.join(available())}")
    options: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = next(iter(method.options)), part
        parser = method.options.get(key.strip())
        if parser is None:
            known = ", ".join(method.options)
            raise ConfigError(f"methods: {name!r} has no option {key.strip()!r}; it has {known}")
        options[key.strip()] = parser(f"{name}:{key.strip()}", value.strip())
    return Spec(method, options, text.strip())


def parse_list(text: str) -> list[Spec]:
    """Read several specs separated by commas; ``all`` means :func:`all_specs`.

    A comma followed by ``option=value`` belongs to the spec before it.
    """
    if text.strip() == "all":
        return all_specs()
    pieces: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        is_option = pieces and ":" in pieces[-1] and "=" in piece and ":" not in piece
        if is_option:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    if not pieces:
        raise ConfigError(f"methods: {text!r} names none; choose from {', '.join(available())}")
    return [parse(piece) for piece in pieces]


def build(
    spec: Spec | str, named_parameters: Iterable[tuple[str, torch.Tensor]], **common: Any
) -> Compressor:
    """Make the compressor that ``spec`` describes.

    Args:
        spec: a spec or its text.
        named_parameters: the model's ``named_parameters()``.
        common: further arguments for the constructor (``process_set``, ``loss_scale``).
    """
    if isinstance(spec, str):
        spec = parse(spec)
    constructor = getattr(
        importlib.import_module(f"{__package__}.constructors"), spec.method.constructor
    )
    arguments = {**common, **spec.method.fixed, **spec.options}
    result: Compressor = constructor(named_parameters, **arguments)
    return result
