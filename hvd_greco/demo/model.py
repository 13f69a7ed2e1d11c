"""A byte-level causal transformer, small enough to train on one core while one watches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import MODELS, ModelSize

VOCABULARY = 256
HEAD_SCALE = 0.2


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width, bias=False)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.attention_out = nn.Linear(size.width, size.width, bias=False)
        self.feed_norm = nn.LayerNorm(size.width, bias=False)
        self.feed_in = nn.Linear(size.width, 4 * size.width, bias=False)
        self.feed_out = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)), approximate="tanh"))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions: relative distance is in the angle, so no position has to be learnt."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class ByteTransformer(nn.Module):
    """Logits over the next byte for each position of ``(batch, length)`` bytes.

    The head starts small, so the first prediction is nearly uniform (8 bits per byte) and no
    warm-up is spent on undoing random confidence; it does not start at zero, which would hide the
    other layers' gradients from a method that sends few entries until the head has grown. All
    weights come from ``seed`` alone, through a generator of their own.
    """

    def __init__(self, size: ModelSize, seed: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, bias=False)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue  # norms keep ones and zeros
            std = 1.0 if name.startswith("embedding") else 1.0 / math.sqrt(parameter.shape[1])
            if name.startswith("head"):
                std *= HEAD_SCALE
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        half = size.width // size.heads // 2
        self.register_buffer(
            "frequencies", 1000.0 ** (-torch.arange(half) / half), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.get_buffer("frequencies")
        cosine, sine = angle.cos(), angle.sin()
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(size: str, seed: int) -> ByteTransformer:
    """The model called ``size``, with weights that depend on ``seed`` and nothing else."""
    return ByteTransformer(MODELS[size], seed)
