"""What a demo run is made of, checked before any rank starts. Needs neither torch nor Horovod."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import methods
from ..config import check_count
from ..errors import ConfigError

#: What ``--methods`` means when it is not given.
DEFAULT_METHODS = "dense,topk,randomk"
DEFAULT_OUTPUT = Path("runs/demo")
DEFAULT_STEPS = 1200
#: Momentum SGD, the optimizer that error feedback is analysed for. A residual delays what it holds
#: by about 1/density steps, and long momentum keeps pushing the way that has passed by then. With
#: 0.5 and a learning rate to match, dense training ends where it ends with 0.7 (2.00 bits per byte
#: after 1,500 steps), and top-k at 1 % ends 1 % above it in place of 2 %. The long warm-up and the
#: clip at the gradient's usual norm keep every method stable at one learning rate.
MOMENTUM = 0.5
WARMUP_SHARE = 0.2
CLIP = 0.5
#: Steps at a method's start, first allocations and Horovod's negotiation, kept out of the median.
UNTIMED_STEPS = 20

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of the transformer, and a peak learning rate that suits them."""

    width: int
    depth: int
    heads: int
    lr: float


MODELS = {
    "tiny": ModelSize(width=32, depth=1, heads=2, lr=2.0),
    "small": ModelSize(width=64, depth=2, heads=4, lr=2.0),
    "base": ModelSize(width=192, depth=4, heads=6, lr=1.0),
}


@dataclass(frozen=True)
class DemoConfig:
    """One run.

    Attributes:
        ranks: processes to start.
        steps: optimizer steps of each method.
        methods: specs of :mod:`hvd_greco.methods`, in order; ``dense`` is among them.
        model: a name in :data:`MODELS`.
        batch: windows per rank and step.
        seq: bytes per window.
        lr: peak learning rate.
        seed: decides initial weights and batches.
        device: where the ranks compute.
    """

    ranks: int = 2
    steps: int = DEFAULT_STEPS
    methods: tuple[str, ...] = ("dense", "topk", "randomk")
    model: str = "small"
    batch: int = 8
    seq: int = 64
    lr: float = field(default=MODELS["small"].lr)
    seed: int = 1
    device: str = "cpu"

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "methods": tuple(values["methods"])})

    def lr_at(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then half a cosine down to zero."""
        warmup = max(1, int(WARMUP_SHARE * self.steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        share = (step - warmup) / max(1, self.steps - warmup)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * share))


def make_config(
    *,
    ranks: int = 2,
    steps: int = DEFAULT_STEPS,
    method_list: str = DEFAULT_METHODS,
    model: str = "small",
    batch: int = 8,
    seq: int = 64,
    lr: float | None = None,
    seed: int = 1,
    device: str = "cpu",
) -> DemoConfig:
    """Check the options and put them together.

    ``dense`` goes first when ``method_list`` lacks it: every other method is judged by it.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    if model not in MODELS:
        raise ConfigError(f"--model: {model!r} is none of {', '.join(MODELS)}")
    if device not in DEVICES:
        raise ConfigError(f"--device: {device!r} is none of {', '.join(DEVICES)}")
    texts = [str(spec) for spec in methods.parse_list(method_list)]
    twice = sorted({text for text in texts if texts.count(text) > 1})
    if twice:
        raise ConfigError(f"--methods: {', '.join(twice)} is there twice; once is enough")
    if "dense" not in texts:
        texts.insert(0, "dense")
    rate = MODELS[model].lr if lr is None else lr
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"--lr: needs a positive number, got {rate!r}")
    longest = 4096
    if check_count("--seq", seq, 2) > longest:
        raise ConfigError(f"--seq: at most {longest} (the text is cut in short pieces), got {seq}")
    return DemoConfig(
        ranks=check_count("--ranks", ranks, 1),
        steps=check_count("--steps", steps, 1),
        methods=tuple(texts),
        model=model,
        batch=check_count("--batch", batch, 1),
        seq=seq,
        lr=rate,
        seed=check_count("--seed", seed),
        device=device,
    )


def prepare_output(folder: Path) -> Path:
    """Make the output folder and prove that a file can be written there.

    A run of minutes must not end at a folder that could have been checked at its start.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".hvd-greco-", dir=folder)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"--output: cannot write in {str(folder)!r} ({error.strerror or error})"
        ) from None
    return folder
