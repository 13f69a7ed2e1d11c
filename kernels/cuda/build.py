"""Compiles the ``.cu`` files with NVRTC; needs no GPU and no driver.

CuPy compiles the same text (:func:`source`) with the same options when the kernels are used. What
is here is for machines without a GPU: :func:`compile_cubin` proves that a file compiles for an
architecture, :func:`resources` says how many registers each kernel takes and what it spills, and
:func:`disassemble` shows the machine code. They need the packages of the extra ``cuda-build``:
cuda-bindings, nvidia-cuda-nvrtc, nvidia-cuda-nvcc (ptxas) and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: The ``.cu`` files.
FILES = tuple(sorted(path.stem for path in HERE.glob("*.cu")))
#: For NVRTC. A product and a sum must not be fused: other devices round both.
OPTIONS = ("-std=c++17", "--fmad=false")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes, by ptxas.

    Attributes:
        registers: 32-bit registers of a thread.
        spills: bytes that a thread loads and stores because it ran out of registers.
        shared: bytes of shared memory of a block.
    """

    registers: int
    spills: int
    shared: int


@cache
def source(name: str) -> str:
    """The text of ``<name>.cu`` with the headers of this folder put in.

    One text with no includes left: CuPy's cache of compiled code knows of no other files.
    """
    return _expand(HERE / f"{name}.cu")


def _expand(path: Path) -> str:
    return re.sub(
        r'^#include "([\w.]+)"$',
        lambda found: _expand(HERE / found.group(1)),
        path.read_text(),
        flags=re.MULTILINE,
    )


def kernels(name: str) -> tuple[str, ...]:
    """Names of the kernels in ``<name>.cu``, in alphabetical order."""
    return tuple(sorted(set(re.findall(r"\.entry\s+(\w+)", compile_ptx(name, "75")))))


@cache
def _compiled(name: str, arch: str, target: str) -> bytes:
    # NVRTC itself, and not cuda.core.Program: that asks the driver for its version when it makes
    # PTX (1.2.2), and here there is none.
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    def check(answer: tuple) -> tuple:
        if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{name}.cu for sm_{arch}: {answer[0].name}\n{log()}")
        return answer[1:]

    def log() -> str:
        text = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, text)
        return text.decode().rstrip("\0")

    program = nvrtc.nvrtcCreateProgram(source(name).encode(), f"{name}.cu".encode(), 0, [], [])[1]
    try:
        options = [option.encode() for option in (f"--gpu-architecture=sm_{arch}", *OPTIONS)]
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        if target == "ptx":
            size, get = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        else:
            size, get = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
        code = b" " * check(size(program))[0]
        check(get(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def compile_ptx(name: str, arch: str) -> str:
    """PTX of ``<name>.cu`` for compute capability ``arch`` (``"80"``)."""
    return _compiled(name, arch, "ptx").decode().rstrip("\0")


def compile_cubin(name: str, arch: str) -> bytes:
    """Machine code (ELF) of ``<name>.cu`` for ``arch``."""
    return _compiled(name, arch, "cubin")


def tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit is: from pip's packages, or on the PATH."""
    try:
        nvidia = importlib.import_module("nvidia")
    except ImportError:
        roots = []
    else:
        roots = [Path(entry) for entry in nvidia.__path__]
    for root in roots:
        for found in sorted(root.glob(f"*/bin/{name}")):
            return str(found)
    return shutil.which(name)


@cache
def _assembled(name: str, arch: str) -> tuple[str, bytes]:
    """What ``ptxas -v`` says of a file, and the cubin that it makes."""
    return _assemble(compile_ptx(name, arch), arch)


def assemble(ptx: str, arch: str) -> dict[str, Resources]:
    """What ptxas says of each kernel in ``ptx``; raises CalledProcessError if it refuses it."""
    return read_resources(_assemble(ptx, arch)[0])


def _assemble(ptx: str, arch: str) -> tuple[str, bytes]:
    ptxas = tool("ptxas")
    if ptxas is None:
        raise FileNotFoundError("ptxas: pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        text, code = Path(folder) / "kernels.ptx", Path(folder) / "kernels.cubin"
        text.write_text(ptx)
        command = [ptxas, "-v", f"-arch=sm_{arch}", str(text), "-o", str(code)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return said, code.read_bytes()


def resources(name: str, arch: str) -> dict[str, Resources]:
    """What ptxas says of each kernel in ``<name>.cu``."""
    return read_resources(_assembled(name, arch)[0])


def read_resources(said: str) -> dict[str, Resources]:
    """:class:`Resources` by kernel from the output of ``ptxas -v``."""
    found = {}
    for part in said.split("Compiling entry function '")[1:]:
        registers = re.search(r"Used (\d+) registers", part)
        if not registers:
            raise ValueError(f"no registers in what ptxas says: {part[:200]}")
        spills = re.findall(r"(\d+) bytes spill", part)
        shared = re.search(r"(\d+) bytes smem", part)
        found[part[: part.index("'")]] = Resources(
            int(registers.group(1)), sum(map(int, spills)), int(shared.group(1)) if shared else 0
        )
    return found


def disassemble(name: str, arch: str) -> dict[str, str]:
    """Machine code of each kernel in ``<name>.cu``, as nvdisasm prints it."""
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        raise FileNotFoundError("nvdisasm: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernels.cubin"
        code.write_bytes(_assembled(name, arch)[1])
        said = subprocess.run(
            [nvdisasm, "-c", str(code)], capture_output=True, text=True, check=True
        ).stdout
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", said, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
