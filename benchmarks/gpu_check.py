"""On a machine with a GPU: are the kernels right, and how fast are they? Under five minutes.

    python benchmarks/gpu_check.py --json gpu.json

Correctness first: every operation on CUDA tensors against the same operation on the CPU, whose
backends the test suite holds to the reference; then every method in a LocalGroup of three ranks on
CUDA tensors, against the same on the CPU. Then times, beside a plain copy, torch and CuPy
(``hvd_greco.bench``). Needs torch, NumPy, CuPy, Numba and a few pure-Python packages, neither
Horovod nor MPI nor a network: ``docs/gpu.md`` tells how to carry the wheels along. It runs from
the source tree as it is.

``--device cpu`` goes through the same steps without a GPU: for trying the script itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from typecheck import link_tree  # noqa: E402

sys.path.insert(0, str(link_tree(ROOT / "build" / "gpu_check")))

import torch  # noqa: E402

from hvd_greco import kernels, methods  # noqa: E402
from hvd_greco.exchange.local import LocalGroup, LocalMember  # noqa: E402
from hvd_greco.kernels import backend_of  # noqa: E402

#: Sizes around the borders of warps, blocks and tiles, and one of many tiles.
SIZES = (1, 31, 32, 33, 255, 257, 1_023, 4_097, 65_537, 1_000_003)
KEY = (0x1234_5678_9ABC_DEF0, 42)
#: What is timed: the operations that move all of a vector, at the size that the goals are for.
TIMED = ("topk_ef,accumulate,take_topk,scatter_add,quantise_ef,quantise_random,dequantise_mean",
         "orthonormalise")  # fmt: skip

Case = tuple[str, Callable[[torch.device], list[torch.Tensor]], bool]


def vector(kind: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A test vector, made on the CPU."""
    generator = torch.Generator().manual_seed(numel)
    made = torch.randn(numel, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        made *= torch.rand(numel, generator=generator) < 0.001
    elif kind == "constant":
        made.fill_(-0.3)
    elif kind == "ties":
        made = torch.randint(-3, 4, (numel,), generator=generator).double()
    elif kind == "heavy":
        made /= torch.rand(numel, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    elif kind == "special":
        made[:: max(1, numel // 7)] = torch.inf
        made[numel // 2] = torch.nan
    return made.to(dtype)


def cases() -> list[Case]:
    """Name, what to compute on a device, and whether results must be equal to the last bit."""
    found: list[Case] = []
    for numel in SIZES:
        for kind in ("gauss", "zeros", "constant", "ties", "heavy", "special"):
            found += _sparse_cases(kind, numel)
            if kind != "special":
                found += _quantiser_cases(kind, numel)
    for rank, length in ((1, 5), (4, 4_096), (7, 1_000), (32, 65_536)):
        stack = vector("gauss", 2 * rank * length).view(2, rank, length)

        def orthonormalise(device: torch.device, stack: torch.Tensor = stack) -> list[torch.Tensor]:
            return [kernels.orthonormalise(stack.to(device))]

        found.append((f"orthonormalise {rank}x{length}", orthonormalise, True))
    return found


def _sparse_cases(kind: str, numel: int) -> list[Case]:
    gradient, residual = vector(kind, numel), vector("gauss", numel)
    ks = sorted({1, max(1, numel // 100), max(1, numel // 2), numel})

    def select(device: torch.device, k: int) -> list[torch.Tensor]:
        out = gradient.to(device, copy=True)
        taken = kernels.accumulate_select(out, residual.to(device), 0.5, out, k, clear=True)
        return [out, *taken]

    def take(device: torch.device, k: int) -> list[torch.Tensor]:
        return list(kernels.take_topk(gradient.to(device), k))

    def accumulate(device: torch.device) -> list[torch.Tensor]:
        out = torch.empty(numel, device=device)
        histogram = kernels.accumulate(gradient.to(device), residual.to(device), 0.5, out)
        return [out, histogram.counts]

    def scatter(device: torch.device) -> list[torch.Tensor]:
        out = residual.to(device, copy=True)
        chosen = kernels.select_topk(vector("gauss", numel), max(1, numel // 3)).to(device)
        values = gradient.nan_to_num(0, 0, 0).to(device)[chosen]
        kernels.scatter_add(out, [(chosen, values), (chosen, 2 * values)], 0.5)
        return [out]

    def offsets(device: torch.device) -> list[torch.Tensor]:
        k = max(1, numel // 50)
        chosen = kernels.select_topk(vector("gauss", numel), k).to(device)
        packed = kernels.pack_block_offsets(chosen, numel)
        bitmap = kernels.pack_bitmap(chosen, numel)
        return [
            packed, kernels.unpack_block_offsets(packed, numel, k), bitmap,
            kernels.unpack_bitmap(bitmap, numel, k),
        ]  # fmt: skip

    made: list[Case] = [(f"accumulate {kind} {numel}", accumulate, True)]
    for k in ks:
        made.append((f"accumulate_select {kind} {numel} k={k}", lambda d, k=k: select(d, k), True))
        made.append((f"take_topk {kind} {numel} k={k}", lambda d, k=k: take(d, k), True))
    made.append((f"scatter_add {kind} {numel}", scatter, True))
    made.append((f"positions {kind} {numel}", offsets, True))
    return made


def _quantiser_cases(kind: str, numel: int) -> list[Case]:
    given = vector(kind, numel)

    def quantise(device: torch.device, bits: int, key: Any) -> list[torch.Tensor]:
        rest, scales = given.to(device, copy=True), torch.empty(-(-numel // 512), device=device)
        nbytes = kernels.packed_bytes(numel, bits)
        codes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        kernels.quantise(rest, 512, "max", bits, key, scales, codes, leave=True)
        header = scales.view(torch.uint8)
        payload = torch.cat((header, codes))
        payload = torch.nn.functional.pad(payload, (0, -payload.numel() % 8))
        out = torch.empty(numel, device=device)
        starts = [0, payload.numel()]
        kernels.dequantise_mean(payload.repeat(2), starts, header.numel(), 512, bits, 2, out)
        return [scales, codes, rest, out]

    def natural(device: torch.device) -> list[torch.Tensor]:
        codes = torch.empty(numel, dtype=torch.uint8, device=device)
        exponent = torch.tensor(20, dtype=torch.int32, device=device)
        kernels.natural_pack(given.to(device), exponent, KEY, codes)
        signs = torch.empty(-(-numel // 8), dtype=torch.uint8, device=device)
        kernels.sign_pack(given.to(device), signs)
        return [codes, signs]

    made: list[Case] = []
    for bits in (2, 3, 4, 8):
        for key in (None, KEY):
            name = f"quantise {kind} {numel} bits={bits} {'random' if key else 'nearest'}"
            made.append((name, lambda d, b=bits, key=key: quantise(d, b, key), True))
    made.append((f"natural, sign {kind} {numel}", natural, True))
    return made


def check_operations(device: torch.device, until: float) -> dict[str, Any]:
    """Every case on the device against the CPU."""
    host, failures, done = torch.device("cpu"), [], 0
    todo = cases()
    for name, compute, exact in todo:
        if time.monotonic() > until:
            failures.append(f"{len(todo) - done} cases were not reached in time")
            break
        done += 1
        try:
            for ours, wanted in zip(compute(device), compute(host), strict=True):
                _compare(name, ours.cpu(), wanted, exact)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return {"cases": done, "failures": failures}


def _compare(name: str, ours: torch.Tensor, wanted: torch.Tensor, exact: bool) -> None:
    if ours.is_floating_point():
        # The payload of a NaN may differ between devices.
        assert torch.equal(ours.isnan(), wanted.isnan()), "NaN elsewhere"
        ours, wanted = ours.nan_to_num(0), wanted.nan_to_num(0)
    if exact:
        assert torch.equal(ours, wanted), f"{int((ours != wanted).sum())} of {ours.numel()} differ"
    else:
        torch.testing.assert_close(ours, wanted, msg=name)


def check_methods(device: torch.device, until: float) -> dict[str, Any]:
    """Every method in a group of three simulated ranks: equal on all, and as on the CPU."""
    from simulate import gaussian

    shapes = {"matrix": (70, 90), "vector": (5_000,), "small": (9,)}
    gradients = gaussian(shapes, 3, steps=4)
    failures, done = [], []
    for name in methods.available():
        if time.monotonic() > until:
            failures.append(f"{name} was not reached in time")
            continue
        try:
            here, there = _train(name, gradients, torch.device("cpu")), None
            there = _train(name, gradients, device)
            for step, (wanted, found) in enumerate(zip(here[0], there[0], strict=True)):
                for layer, mean in found.items():
                    for other in there[1:]:
                        assert torch.equal(mean, other[step][layer]), f"ranks differ in {layer}"
                    scale = float(wanted[layer].abs().max())
                    torch.testing.assert_close(mean, wanted[layer], rtol=1e-4, atol=1e-4 * scale)
            done.append(name)
        except Exception:
            failures.append(f"{name}: {traceback.format_exc(limit=3)[-600:]}")
    return {"methods": done, "failures": failures}


def _train(name: str, gradients: Any, device: torch.device) -> list[list[dict[str, torch.Tensor]]]:
    def program(member: LocalMember) -> list[dict[str, torch.Tensor]]:
        parameters = {
            layer: torch.nn.Parameter(torch.zeros_like(g, device=device))
            for layer, g in gradients[0][0].items()
        }
        compression = methods.build(name, list(parameters.items()), group=member, min_numel=64)
        found = []
        for step in gradients:
            for layer, parameter in parameters.items():
                parameter.grad = None
                (parameter * step[member.rank][layer].to(device)).sum().backward()
            member.reduce_gradients(list(parameters.items()), compression)
            found.append({layer: p.grad.cpu().clone() for layer, p in parameters.items()})
        return found

    return LocalGroup(3).run(program)


def check_times(device: str, size: str, seconds: float) -> list[dict[str, Any]]:
    """Times beside a plain copy, torch and CuPy; as ``hvd-greco bench kernels --json`` has them."""
    from hvd_greco.bench.options import make_options
    from hvd_greco.bench.runner import run_bench

    found = []
    for operations in TIMED:
        options = make_options(
            sizes=size, operations=operations, densities="0.01", bits="4", ranks="4",
            inputs="gaussian", device=device, seconds=seconds, starts=False,
            low_ranks="4,32", lengths="65536",
        )  # fmt: skip
        record = run_bench(options, "benchmarks/gpu_check.py", lambda text, done, of: None)
        found.append(json.loads(record.to_json()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path, help="where the record goes; default: stdout")
    parser.add_argument("--size", default="64000000", help="elements of what is timed")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each timed case")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for correctness")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no GPU; --device cpu tries the script without one")
    device = torch.device(given.device)
    began = time.monotonic()
    served = backend_of(device.type)
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "backend": "portable" if served is None else served.__name__,
        "operations": check_operations(device, began + given.limit),
    }
    record["methods"] = check_methods(device, time.monotonic() + given.limit)
    failures = [*record["operations"]["failures"], *record["methods"]["failures"]]
    print(
        f"correctness: {record['operations']['cases']} cases, "
        f"{len(record['methods']['methods'])} methods, {len(failures)} failures, "
        f"{time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )
    for failure in failures[:20]:
        print(f"  {failure}", file=sys.stderr)
    # Wrong kernels are timed all the same: the machine may not be there again.
    record["times"] = check_times(given.device, given.size, given.seconds)
    record["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(record, indent=1) + "\n"
    if given.json is None:
        print(text, end="")
    else:
        given.json.write_text(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
