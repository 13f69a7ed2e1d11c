"""A codec is added in one file, under a name that nobody else has."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import hvd_greco as greco
from hvd_greco import registry
from hvd_greco.compressor import Compressor
from hvd_greco.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_codec.py"


def test_every_codec_has_a_documented_constructor() -> None:
    for entry in registry.codecs().values():
        if entry.public:
            constructor = getattr(greco, entry.public)
            assert issubclass(constructor, Compressor)
            assert len(constructor.__doc__ or "") > 100, entry.name
            # Dense has nothing to remember, and DGC brings a memory of its own.
            takes_memory = "memory" in inspect.signature(constructor).parameters
            assert takes_memory != (entry.name in ("dense", "dgc"))


def test_constructors_are_one_class_each() -> None:
    assert greco.TopK is greco.TopK
    assert greco.TopK.__name__ == "TopK"


def test_unknown_names_and_arguments_are_refused() -> None:
    with pytest.raises(AttributeError, match="Topk"):
        greco.Topk  # noqa: B018
    with pytest.raises(ConfigError, match=r"densty: TopK has no such argument; it has .*density"):
        greco.TopK([], densty=0.1)
    with pytest.raises(ConfigError, match="by position"):
        greco.TopK([], 0.1, 0.2)


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ConfigError, match=r"'topk' .* is taken by hvd_greco.codecs.topk"):
        registry.register_codec("topk", public="Other", description="")(object)
    with pytest.raises(ConfigError, match="'ef' is taken"):
        registry.register_memory("ef", description="")(object)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
