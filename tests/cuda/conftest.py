"""What the tests of the CUDA side share: where its modules are, and vectors to try."""

from __future__ import annotations

import sys
from pathlib import Path

# Without the package around it, since that imports torch: under the sanitizers that takes long.
sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels" / "cuda"))
# For the cases of test_backends.py, which has them for every backend.
sys.path.append(str(Path(__file__).resolve().parents[1]))
