"""Real English that every Python ships, split without leaks, in batches any run can repeat.

The text is the language reference behind Python's own ``help()``: no download, no licence to
accept, and large enough (about 465 kB) that a small model is still learning when the demo ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

#: Bytes in one block; every ``EVERY``-th block, beginning with the middle one, is held out.
BLOCK = 8192
EVERY = 10
#: The topics quote each other at length. A held-out paragraph of at least this many bytes that
#: also occurs in a training block is cut from training, or validation would reward memory.
QUOTED = 40
#: Marks a position of a validation window that is not to be scored.
IGNORE = -100

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]


def load_text() -> bytes:
    """All help topics of this Python, joined in the order of their sorted names."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _paragraphs(text: bytes) -> list[tuple[int, int]]:
    """``(start, end)`` of each paragraph; blank lines separate and belong to none."""
    found = []
    start = 0
    for gap in re.finditer(rb"\n[ \t]*\n\s*", text):
        found.append((start, gap.start()))
        start = gap.end()
    found.append((start, len(text)))
    return [(a, b) for a, b in found if b > a]


def _normal(paragraph: bytes) -> bytes:
    """A paragraph as compared: quotes are indented and wrapped in their own way."""
    return b" ".join(paragraph.split())


def _blocks(length: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Byte ranges of the training and the held-out blocks."""
    train: list[tuple[int, int]] = []
    held_out: list[tuple[int, int]] = []
    for index, start in enumerate(range(0, length, BLOCK)):
        side = held_out if index % EVERY == EVERY // 2 else train
        side.append((start, min(start + BLOCK, length)))
    return train, held_out


def split_text(text: bytes) -> tuple[list[bytes], list[bytes]]:
    """Training and held-out pieces of ``text``, in order.

    Pieces are contiguous and windows never leave a piece, so no training window reaches a
    held-out byte. Paragraphs that the topics quote from each other stay out of training where
    validation has them.
    """
    train, held_out = _blocks(len(text))
    paragraphs = [(a, b) for a, b in _paragraphs(text) if b - a >= QUOTED]
    known = {
        _normal(text[a:b])
        for a, b in paragraphs
        if any(a < end and b > start for start, end in held_out)
    }
    quoted = [(a, b) for a, b in paragraphs if _normal(text[a:b]) in known]
    pieces = []
    for start, end in train:
        position = start
        for a, b in quoted:
            if a < end and b > start:
                pieces.append(text[position : max(a, start)])
                position = min(b, end)
        pieces.append(text[position:end])
    return [piece for piece in pieces if piece], [text[a:b] for a, b in held_out]


@dataclass(frozen=True)
class Corpus:
    """Windows of ``seq`` bytes, each with the byte that follows every position.

    Attributes:
        seq: positions per window.
        train: all training pieces, joined.
        starts: every offset in ``train`` whose window of ``seq + 1`` bytes lies in one piece.
        held_out: the validation pieces.
    """

    seq: int
    train: Bytes
    starts: Tokens
    held_out: tuple[Bytes, ...]

    def batch(
        self, seed: int, step: int, rank: int, size: int, batch: int
    ) -> tuple[Tokens, Tokens]:
        """Inputs and targets of one rank for one step, each ``(batch, seq)``.

        A pure function of its arguments: every method of a run, and every later run, sees the
        same windows. All ranks draw the same ``size * batch`` windows and take their own slice.
        """
        draw = np.random.default_rng([seed, step]).integers(len(self.starts), size=(size, batch))
        starts = self.starts[draw[rank]]
        window = self.train[starts[:, None] + np.arange(self.seq + 1)].astype(np.int64)
        return window[:, :-1], window[:, 1:]

    def validation(self) -> tuple[Tokens, Tokens]:
        """Inputs and targets that score each held-out byte but a piece's first exactly once.

        Windows do not overlap; the last one of a piece is filled up with :data:`IGNORE`.
        """
        inputs, targets = [], []
        for piece in self.held_out:
            for start in range(0, len(piece) - 1, self.seq):
                window = piece[start : start + self.seq + 1].astype(np.int64)
                rest = self.seq + 1 - len(window)
                inputs.append(np.pad(window[:-1], (0, rest)))
                targets.append(np.pad(window[1:], (0, rest), constant_values=IGNORE))
        return np.stack(inputs), np.stack(targets)


@lru_cache(maxsize=4)
def load_corpus(seq: int) -> Corpus:
    """The demo's corpus in windows of ``seq`` bytes."""
    pieces, held_out = split_text(load_text())
    starts = []
    offset = 0
    for piece in pieces:
        starts.append(np.arange(offset, offset + max(0, len(piece) - seq), dtype=np.int64))
        offset += len(piece)
    return Corpus(
        seq=seq,
        train=np.frombuffer(b"".join(pieces), dtype=np.uint8),
        starts=np.concatenate(starts),
        held_out=tuple(np.frombuffer(piece, dtype=np.uint8) for piece in held_out),
    )
