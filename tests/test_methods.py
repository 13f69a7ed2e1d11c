"""Specs as users write them."""

from __future__ import annotations

import pytest
import torch

from hvd_greco import LocalGroup, methods, registry
from hvd_greco.errors import ConfigError
from hvd_greco.exchange.local import LocalMember


def test_specs_with_options() -> None:
    spec = methods.parse("topk:density=0.001,min_numel=4096")
    assert spec.method.name == "topk"
    assert spec.options == {"density": 0.001, "min_numel": 4096}
    assert methods.parse("topk:0.001").options == {"density": 0.001}
    assert methods.parse(" dense ").options == {}


def test_lists_keep_options_together() -> None:
    specs = methods.parse_list("dense,topk:density=0.1,seed=3,randomk:0.5")
    assert [str(spec) for spec in specs] == ["dense", "topk:density=0.1,seed=3", "randomk:0.5"]
    assert [s.method.name for s in methods.parse_list("all")] == list(methods.available())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topq", "'topq' is none of dense"),
        ("topk:densty=0.1", "no option 'densty'; it has density"),
        ("topk:density=2", "density"),
        ("topk:density=x", "'x' is not a number"),
        ("topk:memory=ef22", "'ef22' is none of dgc, ef, ef21"),
        ("topk:min_numel=1.5", "min_numel"),
    ],
)
def test_bad_specs_say_what_would_work(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods.parse(text)
    assert message in str(caught.value)


def test_help_lists_every_method() -> None:
    assert [name for name in methods.available() if name != "tern"] == list(methods.ORDER)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="names none"):
        methods.parse_list(" , ")


@pytest.mark.parametrize("name", methods.available())
def test_every_method_can_be_built(name: str) -> None:
    def work(member: LocalMember) -> tuple[str, int]:
        model = torch.nn.Linear(300, 40)
        compressor = methods.build(name, model.named_parameters(), group=member)
        return compressor.plan.assignments["weight"].codec, compressor.wire_bytes()

    dense = (300 * 40 + 40) * 4
    # A controller is no codec, and starts with the uniform default of its first family.
    expected = "topk" if name in registry.controllers() else name
    for codec, nbytes in LocalGroup(2).run(work):
        assert codec == expected
        assert nbytes < dense or name == "dense"
