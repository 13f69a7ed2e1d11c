"""Names for codecs, memories and controllers: each registers itself where it is defined.

Nothing here imports torch. The modules of ``hvd_greco.codecs``, ``.memories`` and ``.adapt`` are
imported when a name is first looked up; a package of somebody else's registers its codecs by
importing :func:`register_codec`, or by an entry point in the group ``hvd_greco.codecs``.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import threading
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
        assemble: for methods that are more than a codec (DGC is a codec, a memory and a
            schedule): a function whose arguments are the user's options, the level among them,
            and which returns arguments of ``Compressor``: ``codec`` and any of ``level``,
            ``memory`` and ``schedule``. Such a method brings its memory and its schedule.
    """

    name: str
    factory: Any
    public: str
    description: str
    level: str | None = None
    default: float | int | None = None
    memory: str = "none"
    fixed: Mapping[str, Any] | None = None
    assemble: Callable[..., dict[str, Any]] | None = None

    def options(self) -> dict[str, inspect.Parameter]:
        """The method's own arguments that a user may set, by name; the level is none of them."""
        parameters = inspect.signature(self.assemble or self.factory).parameters
        taken = {*(self.fixed or {}), *([self.level] if self.assemble else [])}
        return {n: p for n, p in parameters.items() if n not in taken}

    @property
    def brings(self) -> tuple[str, ...]:
        """Arguments of ``Compressor`` that the method sets by itself."""
        if self.name in _CONTROLLERS:
            return ("memory", "schedule", "exchange")
        return ("memory", "schedule") if self.assemble else ()

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``Compressor`` that follow from the user's options, checked.

        Args:
            options: the level by its name, and any of :meth:`options`.
        """
        if self.assemble:
            return self.assemble(**options)
        own = dict(options)
        level = own.pop(self.level, self.default) if self.level else None
        codec = self.make(**own)
        return {"codec": codec, "level": level, "memory": self.memory}

    def make(self, **options: Any) -> Any:
        """An instance with the given options."""
        return self.factory(**{**(self.fixed or {}), **options})


_CODECS: dict[str, Entry] = {}
_MEMORIES: dict[str, Entry] = {}
_CONTROLLERS: dict[str, Entry] = {}
_loaded = False
#: Ranks may be threads: none may look a name up while another one is still importing.
_loading = threading.RLock()


def register_codec(
    name: str,
    *,
    public: str,
    description: str,
    level: str | None = None,
    default: float | int | None = None,
    memory: str = "none",
    fixed: Mapping[str, Any] | None = None,
    assemble: Callable[..., dict[str, Any]] | None = None,
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
        _CODECS[name] = Entry(
            name, factory, public, description, level, default, memory, fixed, assemble
        )
        return factory

    return decorate


def register_controller(
    name: str, *, public: str, description: str, assemble: Callable[..., dict[str, Any]]
) -> Callable[[C], C]:
    """Class decorator: make an adaptive method known under ``name``, and as ``hvd_greco.<public>``.

    The class documents the method; ``assemble`` makes ``Compressor``'s arguments from the user's
    options, ``controller`` among them.
    """

    def decorate(factory: C) -> C:
        if name in _CODECS or name in _CONTROLLERS:
            raise ConfigError(f"register_controller: {name!r} is taken")
        _CONTROLLERS[name] = Entry(
            name, factory, public, description, memory="ef", assemble=assemble
        )
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
    with _loading:
        if _loaded:
            return
        _loaded = True
        for folder in ("codecs", "memories", "adapt"):
            package = importlib.import_module(f"{__package__}.{folder}")
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")
        for point in entry_points(group="hvd_greco.codecs"):
            point.load()


def codecs() -> dict[str, Entry]:
    """All codecs by name, sorted."""
    _load()
    return dict(sorted(_CODECS.items()))


def controllers() -> dict[str, Entry]:
    """All adaptive methods by name, sorted."""
    _load()
    return dict(sorted(_CONTROLLERS.items()))


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
