"""What each rank of the demo runs: ``python -m hvd_greco.demo.worker --config JSON``.

mpirun's output is a pipe, so a progress bar drawn here would never be live. Rank 0 therefore
appends JSON lines to a file that the launcher follows and draws from (see ``runner``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .config import DemoConfig

#: Fault injection for the tests: "RANK:STEP" makes that rank raise there.
FAIL_AT = "HVD_GRECO_DEMO_FAIL_AT"
#: Seconds between two step events; a terminal shows no more, and the file stays small.
INTERVAL = 0.1


def decisions_name(place: int) -> str:
    """File for the decisions of the method at that place, beside the events."""
    return f"decisions-{place}.jsonl"


class Events:
    """Rank 0's lines to the launcher; silent on the other ranks."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", buffering=1) if path else None
        self._next = 0.0

    def send(self, kind: str, **facts: Any) -> None:
        """Append one event."""
        if self._file:
            self._file.write(json.dumps({"event": kind, **facts}) + "\n")

    def step(self, method: str, step: int, of: int, loss: float) -> None:
        """Append a step event, unless the last one was just now."""
        now = time.monotonic()
        if now >= self._next or step == of:
            self._next = now + INTERVAL
            self.send("step", method=method, step=step, loss=loss)


def _device(name: str, local_rank: int) -> Any:
    import torch

    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no CUDA device here; use --device cpu")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _fail_for_test(rank: int, step: int) -> None:
    if os.environ.get(FAIL_AT) == f"{rank}:{step}":
        raise RuntimeError(f"rank {rank} was told to fail at step {step} ({FAIL_AT})")


def run(config: DemoConfig, events_path: Path | None) -> None:
    """Train every method of ``config`` in turn on this rank."""
    import horovod
    import horovod.torch as hvd
    import torch

    from .data import load_corpus
    from .model import build_model
    from .train import train_method

    hvd.init()
    rank = hvd.rank()
    if hvd.size() != config.ranks:
        raise RuntimeError(
            f"{config.ranks} ranks were started, but Horovod sees {hvd.size()}: it was built for "
            "another MPI than this mpirun. Run `hvd-greco doctor`"
        )
    device = _device(config.device, hvd.local_rank())
    events = Events(events_path if rank == 0 else None)
    events.send(
        "start",
        world_size=hvd.size(),
        parameters=sum(p.numel() for p in build_model(config.model, config.seed).parameters()),
        device=str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        threads_per_rank=torch.get_num_threads(),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "horovod": horovod.__version__,
        },
    )
    corpus = load_corpus(config.seq)
    for place, method in enumerate(config.methods):
        log = "" if events_path is None else str(events_path.parent / decisions_name(place))
        events.send("method", method=method)

        def on_step(step: int, loss: float, _: float, method: str = method) -> None:
            events.step(method, step, config.steps, loss)
            _fail_for_test(rank, step)

        events.send("result", **train_method(config, method, corpus, device, on_step, log))
    events.send("done")
    hvd.shutdown()


def _own_rank() -> str:
    """This process's rank as the launcher says it: an error may come before hvd.init()."""
    return os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "?"


def main() -> None:
    """Run, and on an error take the whole job down at once, with the first rank's reason shown."""
    parser = argparse.ArgumentParser(description="One rank of `hvd-greco demo`.")
    parser.add_argument("--config", required=True, help="JSON of a DemoConfig")
    parser.add_argument("--events", type=Path, help="file that rank 0 reports to")
    arguments = parser.parse_args()
    try:
        run(DemoConfig.from_json(arguments.config), arguments.events)
    except BaseException:
        lines = traceback.format_exc().rstrip().splitlines()
        text = "\n".join(f"[rank {_own_rank()}] {line}" for line in lines)
        print(text, file=sys.stderr, flush=True)
        # Not sys.exit: Horovod's exit handlers wait for ranks that wait for this one.
        os._exit(1)


if __name__ == "__main__":
    main()
