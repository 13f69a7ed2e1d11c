"""From options to a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import torch

from ..errors import ConfigError
from ..kernels import backend_of
from . import memory, record, timing
from .case import Case, Work, check_memory
from .operations import BY_NAME, make_cases
from .options import LEAST_ROUNDS, BenchOptions
from .record import Record, Row
from .starts import measure_starts

Progress = Callable[[str, int, int], None]


def run_bench(
    options: BenchOptions, command: str, progress: Progress = lambda text, done, of: None
) -> Record:
    """Measure all cases.

    Args:
        options: what to measure.
        command: goes into the record.
        progress: called before each case with its text, how many are done, and how many there are.

    Raises:
        ConfigError: no such operation or device, or a size that does not fit in memory.
    """
    cases = make_cases(options)
    if not cases:
        raise ConfigError("--low-ranks: all of them exceed all --lengths, so nothing is left")
    device = _device(options.device)
    check_memory(cases, device)
    load, before = record.find_load(), torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        threads = torch.get_num_threads()
        starts = []
        if options.starts:
            progress("cold and warm start", 0, len(cases))
            starts = measure_starts(options.device, threads)
        rows = []
        for done, case in enumerate(cases):
            progress(describe(case), done, len(cases))
            rows.append(measure(case, options, device))
    finally:
        torch.set_num_threads(before)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Record(
        schema=record.SCHEMA,
        command=command,
        date=record.now(),
        commit=record.find_commit(),
        device=options.device,
        threads=threads,
        load=load,
        machine=record.find_machine(gpu),
        versions=record.find_versions(),
        memory_method=memory.CUDA_METHOD if gpu else memory.CPU_METHOD,
        rows=rows,
        starts=starts,
    )


def describe(case: Case) -> str:
    """For the eye: ``topk_ef 16,000,000 density=0.01 inputs=gaussian``."""
    axes = asdict(case)
    name, numel = axes.pop("operation"), axes.pop("numel")
    return " ".join([f"{name} {numel:,}", *(f"{k}={v}" for k, v in axes.items() if v is not None)])


def measure(case: Case, options: BenchOptions, device: torch.device) -> Row:
    """One case: times first, then what is counted once."""
    operation = BY_NAME[case.operation]
    work = operation.prepare(case, device)
    source, target = torch.ones(case.numel, device=device), torch.empty(case.numel, device=device)
    contenders: dict[str, timing.Call] = {
        "copy": lambda: target.copy_(source),
        "ours": work.ours,
        "chain": work.chain,
        **work.rivals,
    }
    times = timing.interleave(
        contenders,
        timing.gpu_seconds if device.type == "cuda" else timing.wall_seconds,
        work.reset,
        seconds=options.seconds,
        repetitions=options.repetitions,
        least=LEAST_ROUNDS,
    )
    launches, extra_bytes = _count(work, work.ours, device)
    chain_launches, chain_extra_bytes = _count(work, work.chain, device)
    counted = operation.counted(case)
    low, middle, high = timing.quartiles(times["ours"])
    pairs = list(zip(times["copy"], times["ours"], times["chain"], strict=True))
    slow, speedup, fast = timing.quartiles([chain / ours for _, ours, chain in pairs])
    shares = [counted / ours * copy / (8 * case.numel) for copy, ours, _ in pairs]
    axes = {name: value for name, value in asdict(case).items() if name not in _OWN}
    return Row(
        operation=case.operation,
        numel=case.numel,
        served_by=served_by(operation.entry, device),
        counted_bytes=counted,
        rounds=len(pairs),
        seconds=middle,
        quartiles=(low, high),
        copy_seconds=timing.quartiles(times["copy"])[1],
        chain_seconds=timing.quartiles(times["chain"])[1],
        of_copy=timing.quartiles(shares)[1],
        speedup=speedup,
        speedup_quartiles=(slow, fast),
        rivals={name: timing.quartiles(times[name])[1] for name in work.rivals},
        error=None if work.error is None else work.error(work.ours()),
        launches=launches,
        chain_launches=chain_launches,
        extra_bytes=extra_bytes,
        chain_extra_bytes=chain_extra_bytes,
        **axes,
    )


def _count(
    work: Work, call: Callable[[], object], device: torch.device
) -> tuple[int | None, int | None]:
    """Launches and extra memory of one call each."""
    reset = work.reset or (lambda: None)
    reset()
    launches = memory.launches(call, device)
    reset()
    return launches, memory.extra_bytes(call, device)


_OWN = ("operation", "numel")


def served_by(entry: str, device: torch.device) -> str:
    """``cpu`` or ``cuda`` if the device's backend has the entry of the table, else ``portable``."""
    backend = backend_of(device.type)
    return device.type if hasattr(backend, entry.partition("(")[0]) else "portable"


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device: 'cuda' needs a GPU that torch can use, and torch {torch.__version__} "
            "finds none here; use --device cpu"
        )
    return torch.device(name)
