"""Names for codecs and memories: each registers itself in the file that defines it.

Nothing here imports torch. The modules of ``hvd_greco.codecs`` and ``hvd_greco.memories`` are
imported when a name is first looked up; a package of somebody else's registers its codecs by
importing :func:`register_codec`, or by an entry point in the group ``hvd_greco.codecs``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from .errors import ConfigError

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """One registered codec or memory.

    Attributes:
        name: short name, in plans and on the command line (``"topk"``).
        factory: the class.
        public: name of the constructor in ``hvd_greco`` (``"TopK"``); empty if it has none.
        description: one line.
        level: what the codec's level is called (``"density"``), or None if it has none.
        default: the level's default.
        memory: name of the memory that is used unless the user names one.
        fixed: arguments of the factory that make this entry what it is.
    """

    name: str
    factory: Any
    public: str
    description: str
    level: str | None = None
    default: float | int | None = None
    memory: str = "none"
    fixed: Mapping[str, Any] | None = None

    def options(self) -> dict[str, inspect.Parameter]:
        """The factory's own arguments that a user may set, by name."""
        parameters = inspect.signature(self.factory).parameters
        return {n: p for n, p in parameters.items() if n not in (self.fixed or {})}

    def make(self, **options: Any) -> Any:
        """An instance with the given options."""
        return self.factory(**{**(self.fixed or {}), **options})


_CODECS: dict[str, Entry] = {}
_MEMORIES: dict[str, Entry] = {}
_loaded = False


def register_codec(
    name: str,
    *,
    public: str,
    description: str,
    level: str | None = None,
    default: float | int | None = None,
    memory: str = "none",
    fixed: Mapping[str, Any] | None = None,
) -> Callable[[C], C]:
    """Class decorator: make a codec known under ``name``, and as ``hvd_greco.<public>``.

    Raises:
        ConfigError: the name or the public name is taken.
    """

    def decorate(factory: C) -> C:
        for other in _CODECS.values():
            if other.name == name or (public and other.public == public):
                raise ConfigError(
                    f"register_codec: {name!r} ({public}) is taken by {other.factory.__module__}"
                )
        _CODECS[name] = Entry(name, factory, public, description, level, default, memory, fixed)
        return factory

    return decorate


def register_memory(name: str, *, description: str) -> Callable[[C], C]:
    """Class decorator: make a memory known under ``name``."""

    def decorate(factory: C) -> C:
        if name in _MEMORIES:
            raise ConfigError(
                f"register_memory: {name!r} is taken by {_MEMORIES[name].factory.__module__}"
            )
        _MEMORIES[name] = Entry(name, factory, "", description)
        return factory

    return decorate


def _load() -> None:
    global _loaded
    if _loaded:
        return
    _loaded = True
    for folder in ("codecs", "memories"):
        package = importlib.import_module(f"{__package__}.{folder}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
    for point in entry_points(group="hvd_greco.codecs"):
        point.load()


def codecs() -> dict[str, Entry]:
    """All codecs by name, sorted."""
    _load()
    return dict(sorted(_CODECS.items()))


def memories() -> dict[str, Entry]:
    """All memories by name, sorted."""
    _load()
    return dict(sorted(_MEMORIES.items()))


def find_codec(name: str) -> Entry:
    """The codec of that name, or a :class:`ConfigError` that lists what there is."""
    found = codecs().get(name)
    if found is None:
        raise ConfigError(f"method: {name!r} is none of {', '.join(codecs())}")
    return found


def find_memory(name: str) -> Entry:
    """The memory of that name, or a :class:`ConfigError` that lists what there is."""
    found = memories().get(name)
    if found is None:
        raise ConfigError(f"memory: {name!r} is none of {', '.join(memories())}")
    return found
