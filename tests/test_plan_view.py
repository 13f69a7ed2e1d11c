"""Logs of decisions as tables and pictures, and the example of a policy of one's own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import run as cli

import hvd_greco as greco
from hvd_greco.adapt.journal import Interval, LayerLine, read_journal
from hvd_greco.adapt.show import draw, intervals_table, layers_table
from hvd_greco.errors import ConfigError
from hvd_greco.exchange.local import LocalMember
from simulate import gaussian, run

SHAPES = {"wide": (64, 96), "tall": (200, 20), "bias": (60,)}
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_policy.py"


def log_of(folder: Path, steps: int = 13, **options: Any) -> Path:
    log = folder / "decisions.jsonl"
    generator = torch.Generator().manual_seed(0)
    given = gaussian(SHAPES, 2, steps)
    for ranks in given:
        for each in ranks:
            wide = each["wide"]
            assert wide is not None
            each["wide"] = wide * (torch.rand(wide.shape, generator=generator) < 0.02)

    def build(named: list[tuple[str, torch.Tensor]], member: LocalMember) -> Any:
        own = str(log) if member.rank == 0 else ""
        return greco.LGreco(named, interval=4, min_numel=100, group=member, log=own, **options)

    run(given, build)
    return log


def shown(table: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_tables(tmp_path: Path) -> None:
    lines = read_journal(log_of(tmp_path))
    text = shown(intervals_table(lines))
    for line in lines:
        if isinstance(line, Interval):
            assert f"{line.bytes:,.0f}" in text
            assert line.reason[:20] in text
    text = shown(layers_table(lines, 0))
    first = [line for line in lines if isinstance(line, LayerLine) and line.interval == 0]
    assert {line.layer for line in first} == {"wide", "tall"}
    for line in first:
        assert line.layer in text
        assert line.new in text
    assert "layers, decision 2" in shown(layers_table(lines))
    with pytest.raises(ConfigError, match=r"--interval: 7 is not in the log, which has 0 to 2"):
        layers_table(lines, 7)


def test_a_log_without_decisions(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(ConfigError, match="which has none"):
        layers_table(read_journal(empty))
    with pytest.raises(ConfigError, match="no decision to draw"):
        draw([], tmp_path / "x.png")


def test_the_picture_has_every_layer_and_decision(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    draw(read_journal(log), tmp_path / "levels.svg")
    text = (tmp_path / "levels.svg").read_text()
    # Text is drawn as paths; matplotlib says in comments what they are.
    for word in ("wide", "tall", "start", "4", "8", "12"):
        assert f"<!-- {word} -->" in text
    for line in read_journal(log):
        if isinstance(line, LayerLine):
            assert f"<!-- {line.new} -->" in text


def test_the_command(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    done = cli("plan", str(log), "--plot", str(tmp_path / "levels.png"))
    assert done.returncode == 0, done.stderr
    assert "decisions" in done.stdout
    assert (tmp_path / "levels.png").read_bytes().startswith(b"\x89PNG")
    done = cli("plan", str(log), "--json")
    found = json.loads(done.stdout)
    assert [each["kind"] for each in found[:3]] == ["interval", "layer", "layer"]
    done = cli("plan", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


def example() -> Any:
    spec = importlib.util.spec_from_file_location("own_policy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["topk", "auto"])
def test_the_example_keeps_its_share_of_energy(family: str, tmp_path: Path) -> None:
    policy = example().KeepEnergy(0.6)
    lines = read_journal(log_of(tmp_path, family=family, policy=policy))
    layers = [line for line in lines if isinstance(line, LayerLine)]
    assert layers
    for line in layers:
        assert line.error <= 0.4 * line.energy
        assert line.reason.startswith("loses")
    with pytest.raises(ConfigError, match="share"):
        example().KeepEnergy(0)


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
