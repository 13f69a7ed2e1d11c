"""What one rank does for one method: the user's own training loop, plus what the table needs."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import methods, registry
from ..compressor import Compressor
from ..errors import MismatchError
from ..telemetry import LayerReport, StepReport
from .config import CLIP, MOMENTUM, UNTIMED_STEPS, DemoConfig
from .data import IGNORE, Corpus
from .model import VOCABULARY, build_model

#: Windows scored at once; bounds the memory of validation, not its result.
CHUNK = 64

OnStep = Callable[[int, float, float], None]


def summed_bits(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
    """Bits that ``model`` needs for the scored targets, and how many there are."""
    nats, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(inputs), CHUNK):
            wanted = targets[start : start + CHUNK].flatten()
            logits = model(inputs[start : start + CHUNK]).view(-1, VOCABULARY)
            loss = F.cross_entropy(logits.double(), wanted, ignore_index=IGNORE, reduction="sum")
            nats += float(loss)
            count += int((wanted != IGNORE).sum())
    return nats / math.log(2.0), count


def validate(model: nn.Module, corpus: Corpus, device: torch.device) -> float:
    """Bits per held-out byte; each rank scores its share of the windows."""
    inputs, targets = (torch.from_numpy(part) for part in corpus.validation())
    mine = slice(hvd.rank(), None, hvd.size())
    bits, count = summed_bits(model, inputs[mine].to(device), targets[mine].to(device))
    totals = torch.tensor([bits, float(count)], dtype=torch.float64)
    totals = hvd.allreduce(totals, op=hvd.Sum, name="demo/validation")
    return float(totals[0] / totals[1])


def check_equal_parameters(model: nn.Module, method: str) -> None:
    """Every rank must hold the same bits, or the exchange was wrong, whatever the loss says.

    Raises:
        MismatchError: some rank's parameters differ from rank 0's.
    """
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).view(1, -1)
    everyone = hvd.allgather(mine, name="demo/digest")
    wrong = [rank for rank, row in enumerate(everyone) if not torch.equal(row, everyone[0])]
    if wrong:
        raise MismatchError(
            f"after training with {method!r} the parameters of ranks {wrong} differ from those of "
            "rank 0, which must never happen: please report it with this command line"
        )


def _compressed(layers: Iterable[LayerReport]) -> dict[str, Any]:
    """Bytes of the layers that sent less than dense; those left alone dilute a method's ratio."""
    chosen = [layer for layer in layers if layer.sent_bytes < layer.dense_bytes]
    wire = sum(layer.sent_bytes for layer in chosen)
    dense = sum(layer.dense_bytes for layer in chosen)
    return {
        "layers": len(chosen),
        "wire_bytes": wire,
        "dense_bytes": dense,
        "ratio": dense / wire if wire else None,
    }


def _plan(compression: Compressor) -> list[dict[str, Any]]:
    """What each layer ended with, and what it sent in the last step."""
    report = compression.last_report
    sent = {} if report is None else {layer.name: layer for layer in report.layers}
    return [
        {
            "layer": name,
            "assignment": str(assignment),
            "wire_bytes": sent[name].sent_bytes if name in sent else None,
            "dense_bytes": sent[name].dense_bytes if name in sent else None,
        }
        for name, assignment in compression.plan.assignments.items()
    ]


class _Traffic:
    """Sums the step reports of one method."""

    def __init__(self, parameters: int) -> None:
        self._dense = 4 * parameters
        self._steps = self._wire = self._network = 0
        self._last: StepReport | None = None

    def add(self, report: StepReport | None) -> None:
        """Count a step; Horovod leaves the compressor out of a job of one rank."""
        self._steps += 1
        if report is not None:
            self._wire += report.sent_bytes
            self._network += report.network_bytes
            self._dense = report.dense_bytes
            self._last = report

    def summary(self) -> dict[str, Any]:
        """Averages over the steps, for the summary file."""
        return {
            "wire_bytes_per_step": round(self._wire / self._steps),
            "dense_bytes_per_step": self._dense,
            "ratio": self._dense * self._steps / self._wire if self._wire else None,
            "network_bytes_per_step": round(self._network / self._steps),
            "compressed_layers": _compressed(self._last.layers if self._last else ()),
        }


def train_method(
    config: DemoConfig,
    method: str,
    corpus: Corpus,
    device: torch.device,
    on_step: OnStep,
    log: str = "",
) -> dict[str, Any]:
    """Train a fresh model with one method and return its line of the summary.

    Args:
        config: the run.
        method: spec of the method.
        corpus: where batches come from.
        device: where to compute.
        on_step: called with the number of finished steps, this rank's loss in bits per byte and
            the step's seconds.
        log: file for an adaptive method's decisions, unless its spec names one.
    """
    model = build_model(config.model, config.seed).to(device)
    spec = methods.parse(method)
    # DGC applies momentum before compressing, and refuses an optimizer that adds its own.
    brings_momentum = "momentum" in spec.method.options()
    own: dict[str, Any] = {"momentum": MOMENTUM} if brings_momentum else {}
    adaptive = spec.method.name in registry.controllers()
    if adaptive and "log" not in spec.options:
        own["log"] = log
    compression = methods.build(spec, model.named_parameters(), **own)
    momentum = 0.0 if brings_momentum else MOMENTUM
    base = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(
        base, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    traffic = _Traffic(sum(parameter.numel() for parameter in model.parameters()))
    seconds, codec_seconds = [], []
    for step in range(config.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(step)
        batch = corpus.batch(config.seed, step, hvd.rank(), hvd.size(), config.batch)
        inputs, targets = (torch.from_numpy(part).to(device) for part in batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.flatten())
        loss.backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()
        bits = float(loss.detach()) / math.log(2.0)
        seconds.append(time.perf_counter() - begin)
        report = compression.last_report
        codec_seconds.append(0.0 if report is None else report.codec_seconds)
        traffic.add(report)
        on_step(step + 1, bits, seconds[-1])
    check_equal_parameters(model, method)
    quality = validate(model, corpus, device)
    # No later method may pay for this one's hooks or residuals.
    memory = compression.memory_bytes()
    compression.close()
    warm = min(UNTIMED_STEPS, len(seconds) // 2)
    return {
        "method": method,
        **traffic.summary(),
        "step_ms_median": round(1e3 * statistics.median(seconds[warm:]), 3),
        "codec_ms_median": round(1e3 * statistics.median(codec_seconds[warm:]), 3),
        # JSON has no NaN; a run that diverged has no bits per byte.
        "val_bits_per_byte": quality if math.isfinite(quality) else None,
        "wire_bytes_predicted": compression.wire_bytes(),
        "memory_bytes": memory,
        **({"plan": _plan(compression)} if adaptive else {}),
    }
