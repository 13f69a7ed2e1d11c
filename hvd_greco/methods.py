"""Methods as users write them on the command line: ``topk:density=0.001,memory=ef21``.

Importing this module needs neither torch nor Horovod; looking a method up imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import registry
from .config import check_count
from .errors import ConfigError
from .registry import Entry

if TYPE_CHECKING:
    import torch

    from .compressor import Compressor

#: Options of every method, beside the codec's own, with a value that shows their type.
_COMMON: Mapping[str, Any] = {"memory": "", "exchange": "", "min_numel": 0, "seed": 0}

#: The order of tables; what is not named here (codecs of others) follows by name. Also what help
#: texts list, since looking methods up imports torch.
ORDER = (
    "dense", "fp16", "bf16", "topk", "dgc", "sharedtopk", "randomk",
    "qsgd", "natural", "sign", "summable", "powersgd", "acp", "lgreco",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A method and its options, as written."""

    method: Entry
    options: Mapping[str, Any]
    text: str

    def __str__(self) -> str:
        return self.text


def available() -> dict[str, Entry]:
    """All methods by name, in the order in which tables show them."""
    rank = {name: i for i, name in enumerate(ORDER)}
    found = {**registry.codecs(), **registry.controllers()}
    return {name: found[name] for name in sorted(found, key=lambda n: (rank.get(n, len(rank)), n))}


def all_specs() -> list[Spec]:
    """What ``--methods all`` means: every method at its defaults."""
    return [parse(name) for name in available()]


def _options(entry: Entry) -> dict[str, Any]:
    """Option -> an example of its type; the first is the one that a bare value sets."""
    found: dict[str, Any] = {entry.level: entry.default} if entry.level else {}
    for name, parameter in entry.options().items():
        found[name] = "" if parameter.default is inspect.Parameter.empty else parameter.default
    common = {name: value for name, value in _COMMON.items() if name not in entry.brings}
    return {**found, **common}


def _read(argument: str, text: str, example: Any) -> Any:
    if isinstance(example, bool):
        values = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.lower() not in values:
            raise ConfigError(f"{argument}: {text!r} is neither true nor false")
        return values[text.lower()]
    if isinstance(example, str):
        return text
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{argument}: {text!r} is not a number") from None
    if isinstance(example, int):
        return check_count(argument, int(number) if number.is_integer() else number)
    if example is None and number.is_integer():
        return int(number)  # as a person would write it in Python
    return number


def parse(text: str) -> Spec:
    """Read a spec: a name, optionally ``:value`` or ``:option=value,option=value``.

    Raises:
        ConfigError: unknown name or option, or a value that cannot be.
    """
    name, _, rest = text.strip().partition(":")
    if name not in available():
        raise ConfigError(f"methods: {name!r} is none of {', '.join(available())}")
    entry = available()[name]
    known, options = _options(entry), {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = next(iter(known)), part
        key = key.strip()
        if key not in known:
            raise ConfigError(f"methods: {name!r} has no option {key!r}; it has {', '.join(known)}")
        options[key] = _read(f"{name}:{key}", value.strip(), known[key])
    made = entry.arguments({k: v for k, v in options.items() if k not in _COMMON})
    made["codec"].check_level(made.get("level"))
    if "memory" in options:
        registry.find_memory(options["memory"])
    return Spec(entry, options, text.strip())


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
    from .constructors import make

    if isinstance(spec, str):
        spec = parse(spec)
    return make(spec.method, named_parameters, **{**common, **spec.options})
