"""Compressors by their names: what a training script calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .codecs.dense import BF16Codec, DenseCodec
from .codecs.randomk import RandomKCodec
from .codecs.topk import TopKCodec
from .compressor import Compressor


class TopK(Compressor):
    """The largest entries of each rank's gradient, with error feedback.

    Args:
        named_parameters: the model's ``named_parameters()``.
        density: share of entries that each rank sends, in (0, 1]. 0.01 is a safe start, and about
            1/66 of dense; 0.001 suits large models and slow links. Each rank receives N-1
            payloads, so halve it when you double the ranks.
        options: see :class:`Compressor`.

    Memory: one fp32 copy of the compressed layers (the residual), payload-sized buffers, and one
    fp32 vector of the largest layer.

    Paper: Stich et al. 2018, "Sparsified SGD with memory" (arXiv 1809.07599).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        density: float = 0.01,
        **options: Any,
    ) -> None:
        super().__init__(named_parameters, TopKCodec(), density, **options)


class RandomK(Compressor):
    """The same randomly drawn entries on all ranks, carried by Horovod's own allreduce.

    A baseline: the study found it very bad. Its payload is summable, so it works with
    ``hvd.join()`` and does not grow with the number of ranks.

    Args:
        named_parameters: the model's ``named_parameters()``.
        density: share of entries that are sent, in (0, 1].
        error_feedback: keep what was not sent (default). Without, values are multiplied by d/k:
            unbiased, with a variance that needs a far smaller learning rate.
        options: see :class:`Compressor`.

    Memory: as for :class:`TopK` with error feedback; without, no residual.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        density: float = 0.01,
        *,
        error_feedback: bool = True,
        **options: Any,
    ) -> None:
        codec = RandomKCodec(rescale=not error_feedback)
        super().__init__(named_parameters, codec, density, error_feedback=error_feedback, **options)


class Dense(Compressor):
    """No selection: every entry, in the dtype of your choice on the wire.

    Args:
        named_parameters: the model's ``named_parameters()``.
        wire: ``"native"`` (the gradient's own dtype; bf16 gradients ride in fp32), ``"fp32"``,
            ``"fp16"`` (half the bytes of fp32; a sum over all ranks beyond 65,504 overflows), or
            ``"bf16"`` (half the bytes with fp32's range; two rounds of our own, added in fp32).
        options: see :class:`Compressor`.

    Memory: none with ``"native"``; a copy in the wire's dtype of the layers in flight otherwise.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.Tensor]],
        wire: str = "native",
        **options: Any,
    ) -> None:
        codec = BF16Codec() if wire == "bf16" else DenseCodec(wire)
        super().__init__(named_parameters, codec, None, **options)
