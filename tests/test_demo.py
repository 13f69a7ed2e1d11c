"""The demo: repeatable input, an honest metric, a whole summary or none."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from hvd_greco.demo import data
from hvd_greco.demo.config import DEFAULT_STEPS, MODELS, DemoConfig, make_config, prepare_output
from hvd_greco.demo.model import VOCABULARY, build_model
from hvd_greco.demo.summary import RESULT_KEYS, make_table, write_summary
from hvd_greco.errors import ConfigError

CLI = [sys.executable, "-c", "from hvd_greco.cli import main; main()", "demo"]
LIMIT = 240


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_cli(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **env},
        # A suite started in the background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=_heed_interrupts,
    )


def run_cli(*arguments: str, **env: str) -> tuple[int, str, str]:
    process = start_cli(*arguments, **env)
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()  # the runner turns it into the end of its ranks
        out, err = process.communicate(timeout=30)
        pytest.fail(f"no end after {LIMIT} s:\n{out}\n{err}")
    return process.returncode, out, err


# -- data ----------------------------------------------------------------------------------------


def test_blocks_cover_the_text_once() -> None:
    train, held_out = data._blocks(100_000)
    edges = sorted(train + held_out)
    assert (edges[0][0], edges[-1][1]) == (0, 100_000)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))
    assert 0.05 < sum(b - a for a, b in held_out) / 100_000 < 0.15


def test_windows_stay_within_one_piece_and_out_of_validation() -> None:
    text = data.load_text()
    pieces, held_out = data.split_text(text)
    corpus = data.load_corpus(64)
    assert corpus.train.tobytes() == b"".join(pieces)
    assert all(piece in text for piece in pieces)
    edges = np.cumsum([len(piece) for piece in pieces])
    first = np.searchsorted(edges, corpus.starts, side="right")
    last = np.searchsorted(edges, corpus.starts + corpus.seq, side="right")
    assert np.array_equal(first, last)
    # Topics quote each other; what validation has must not be learnt by heart elsewhere.
    width = 100
    learnt = {p[i : i + width] for p in pieces for i in range(len(p) - width + 1)}
    windows = [h[i : i + width] for h in held_out for i in range(len(h) - width + 1)]
    assert sum(window in learnt for window in windows) < 0.01 * len(windows)


def test_the_quote_check_sees_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = data.load_text()
    kept = sum(map(len, data.split_text(text)[0]))
    monkeypatch.setattr(data, "QUOTED", 10**9)
    assert sum(map(len, data.split_text(text)[0])) > kept


def test_batches_repeat_and_differ_between_ranks_steps_and_seeds() -> None:
    corpus = data.load_corpus(32)
    inputs, targets = corpus.batch(3, 7, 0, 2, 4)
    assert inputs.shape == targets.shape == (4, 32)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])
    again = corpus.batch(3, 7, 0, 2, 4)
    assert np.array_equal(inputs, again[0])
    assert np.array_equal(targets, again[1])
    for other in ((3, 7, 1, 2, 4), (3, 8, 0, 2, 4), (4, 7, 0, 2, 4)):
        assert not np.array_equal(inputs, corpus.batch(*other)[0])


@pytest.mark.parametrize("seq", [7, 64, 1000])
def test_validation_scores_each_byte_once(seq: int) -> None:
    corpus = data.load_corpus(seq)
    inputs, targets = corpus.validation()
    assert inputs.shape == targets.shape
    assert inputs.shape[1] == seq
    scored = targets[targets != data.IGNORE]
    assert np.array_equal(scored, np.concatenate([piece[1:] for piece in corpus.held_out]))


# -- model and metric ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", MODELS)
def test_weights_depend_on_the_seed_alone(size: str) -> None:
    torch.manual_seed(1)
    first = build_model(size, 5)
    torch.manual_seed(2)
    second, other = build_model(size, 5), build_model(size, 6)
    for name, parameter in first.state_dict().items():
        assert torch.equal(parameter, second.state_dict()[name]), name
    assert not torch.equal(first.head.weight, other.head.weight)


def test_predictions_are_causal_and_start_near_uniform() -> None:
    model = build_model("tiny", 0)
    x = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 10:] = 0
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    loss = nn.functional.cross_entropy(before.view(-1, 256), changed.flatten())
    assert float(loss.detach()) / math.log(2) == pytest.approx(8, abs=0.3)


class _Uniform(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x.shape, VOCABULARY)


def test_uniform_predictor_needs_eight_bits() -> None:
    train = pytest.importorskip("hvd_greco.demo.train")
    corpus = data.load_corpus(64)
    inputs, targets = (torch.from_numpy(part) for part in corpus.validation())
    bits, count = train.summed_bits(_Uniform(), inputs, targets)
    assert count == sum(len(piece) - 1 for piece in corpus.held_out)
    assert bits / count == pytest.approx(8.0, abs=1e-9)


# -- options and output --------------------------------------------------------------------------


def test_dense_is_always_there_and_first() -> None:
    assert make_config(method_list="topk,fp16").methods == ("dense", "topk", "fp16")
    assert make_config(method_list="topk,dense").methods == ("topk", "dense")
    assert "randomk" in make_config(method_list="all").methods


def test_config_survives_the_command_line() -> None:
    config = make_config(method_list="topk:density=0.02,min_numel=10,fp16", model="base", lr=0.1)
    assert DemoConfig.from_json(config.to_json()) == config


def test_learning_rate_rises_once_and_ends_near_zero() -> None:
    config = make_config()
    rates = [config.lr_at(step) for step in range(DEFAULT_STEPS)]
    peak = int(np.argmax(rates))
    assert max(rates) == pytest.approx(config.lr)
    assert np.all(np.diff(rates[: peak + 1]) > 0)
    assert np.all(np.diff(rates[peak + 1 :]) < 0)
    assert rates[-1] < 1e-4 * config.lr
    assert make_config(steps=1).lr_at(0) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks"),
        ({"ranks": -1}, "--ranks"),
        ({"steps": 0}, "--steps"),
        ({"batch": 0}, "--batch"),
        ({"seq": 1}, "--seq"),
        ({"seq": 100_000}, "--seq"),
        ({"seed": -1}, "--seed"),
        ({"lr": 0.0}, "--lr"),
        ({"lr": math.nan}, "--lr"),
        ({"model": "huge"}, "tiny, small, base"),
        ({"device": "tpu"}, "cpu, cuda"),
        ({"method_list": "topk,nothing"}, "nothing"),
        ({"method_list": ""}, "methods"),
        ({"method_list": "topk:density=1.5"}, "density"),
        ({"method_list": "topk,topk"}, "twice"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**options)  # type: ignore[arg-type]


def test_output_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output"):
        prepare_output(tmp_path / "file" / "below")
    assert list(prepare_output(tmp_path / "a" / "b").iterdir()) == []


def test_command_refuses_before_any_rank_starts(tmp_path: Path) -> None:
    code, out, err = run_cli("--ranks", "0", "--output", str(tmp_path))
    assert code == 2
    assert "--ranks" in err
    assert "Traceback" not in err + out
    assert "starting" not in err


def test_importing_the_command_does_not_import_torch() -> None:
    program = "import sys, hvd_greco.cli.demo; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def _summary(bits: float | None) -> dict[str, object]:
    numbers = {
        "wire_bytes_per_step": 10,
        "dense_bytes_per_step": 40,
        "step_ms_median": 1.0,
        "codec_ms_median": 0.1,
    }
    numbers["network_bytes_per_step"] = 10
    result = {"method": "dense", **numbers, "ratio": 4.0, "val_bits_per_byte": bits}
    return {"world_size": 2, "steps": 3, "seed": 1, "parameters": 10, "results": [result]}


def test_summary_is_whole_or_the_old_one(tmp_path: Path) -> None:
    target = write_summary(_summary(2.0), tmp_path)
    before = target.read_text()
    with pytest.raises(ValueError):
        write_summary(_summary(math.nan), tmp_path)
    assert target.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_table_shows_a_run_that_diverged() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(make_table(_summary(None)))
    assert "diverged" in captured.get()


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 60)
def test_two_ranks_train_and_report(tmp_path: Path) -> None:
    code, out, err = run_cli(
        *("--steps", "30", "--model", "tiny", "--methods", "dense,topk,randomk", "--json"),
        *("--seed", "4", "--output", str(tmp_path)),
    )
    assert code == 0, out + err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert json.loads(out) == summary
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    parameters = sum(p.numel() for p in build_model("tiny", 4).parameters())
    facts = [summary[key] for key in ("world_size", "steps", "seed", "parameters")]
    assert facts == [2, 30, 4, parameters]
    assert [result["method"] for result in summary["results"]] == ["dense", "topk", "randomk"]
    for result in summary["results"]:
        assert set(RESULT_KEYS) <= set(result)
        assert result["dense_bytes_per_step"] == 4 * parameters
        ratio = result["dense_bytes_per_step"] / result["wire_bytes_per_step"]
        assert result["ratio"] == pytest.approx(ratio, rel=1e-3)
        assert result["wire_bytes_per_step"] == result["wire_bytes_predicted"]
        assert result["step_ms_median"] > result["codec_ms_median"]
        assert (result["codec_ms_median"] > 0) == (result["method"] != "dense")
        assert 2 < result["val_bits_per_byte"] < 8
    dense, topk, _ = summary["results"]
    assert dense["ratio"] == 1
    assert topk["compressed_layers"]["ratio"] >= 24
    assert "topk" in err
    assert "step 30/30" in err  # no terminal: lines, not a bar


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 60)
def test_a_rank_that_raises_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    code, out, err = run_cli(
        *("--steps", "20", "--model", "tiny", "--methods", "dense", "--output", str(tmp_path)),
        HVD_GRECO_DEMO_FAIL_AT="1:3",
    )
    assert code != 0
    assert "[rank 1] RuntimeError: rank 1 was told to fail at step 3" in err
    assert "no summary was written" in err
    assert list(tmp_path.iterdir()) == [], out


def _ranks_of(seed: int) -> list[int]:
    """Workers that run with ``seed``, which marks them as ours among other people's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes()
            if b"hvd_greco.demo.worker" in line and f'"seed": {seed}'.encode() in line:
                found.append(int(entry.name))
    return found


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_no_ranks(tmp_path: Path, sign: signal.Signals) -> None:
    seed = int(time.time_ns() % 2**31)
    process = start_cli(
        *("--steps", "1000000", "--model", "tiny", "--seed", str(seed), "--output", str(tmp_path))
    )
    try:
        deadline = time.monotonic() + 60
        while len(_ranks_of(seed)) < 2:
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)
        process.send_signal(sign)
        process.communicate(timeout=30)
    except BaseException:
        # A test that fails must not leave ranks behind that run for days.
        for rank in _ranks_of(seed):
            os.kill(rank, signal.SIGKILL)
        raise
    finally:
        process.kill()
    assert process.returncode != 0
    deadline = time.monotonic() + 10
    while _ranks_of(seed) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _ranks_of(seed) == []
    assert list(tmp_path.iterdir()) == []
