"""How many fewer bytes do levels chosen per layer need, at the error of the uniform default?

``python benchmarks/lgreco_gain.py`` trains three models on two simulated ranks with a uniform
default and error feedback, and records what every level of every layer would have lost, summed over
ranks (the controller's own statistics). On these records it compares:

* the uniform default, which sets the budget of error;
* ours: squared errors, convex hulls, skip and dense among the choices;
* the paper's: norms of errors, its programme that rounds errors up into 10,000 parts, no skipping,
  ranks between half and twice the default;
* for ``auto``, all families at once beside the best single family at the same budget.

Bytes are those that a rank puts on the link in a step, biases and checks included.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hvd_greco as greco
from hvd_greco.adapt import solve
from hvd_greco.adapt.solve import InfeasibleError, Problem
from hvd_greco.exchange.local import LocalMember
from hvd_greco.plan import Assignment

RANKS = 2
FAMILIES = {"topk": 0.01, "powersgd": 4, "acp": 4, "qsgd": 4, "auto": 0.01}
#: Single families that ``auto`` is compared with, and their defaults.
SINGLES = {"topk": 0.01, "powersgd": 4, "qsgd": 4}
Batches = Iterator[Callable[[nn.Module], torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """A model, its data, and how long it is trained."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    interval: int
    lr: float


class Recorder(greco.Policy):
    """Keeps the uniform default, and everything that a decision could have been based on."""

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[greco.Evidence] = []

    def decide(self, evidence: greco.Evidence) -> greco.Decision:
        self.seen.append(evidence)
        return greco.Decision(evidence.defaults, "recorded")


# -- models ------------------------------------------------------------------------------------


def _text() -> tuple[Callable[[], nn.Module], Callable[[int], Batches]]:
    from hvd_greco.demo.data import load_corpus
    from hvd_greco.demo.model import build_model

    corpus = load_corpus(64)

    def batches(rank: int) -> Batches:
        text = torch.from_numpy(np.frombuffer(b"\n".join(_pieces()), dtype=np.uint8).copy()).long()
        generator = torch.Generator().manual_seed(rank)
        while True:
            at = torch.randint(len(text) - 65, (8,), generator=generator)
            windows = torch.stack([text[i : i + 65] for i in at])
            yield (
                lambda model, w=windows: nn.functional.cross_entropy(  # type: ignore[misc]
                    model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()
                )
            )

    assert corpus
    return lambda: build_model("small", 1), batches


def _pieces() -> list[bytes]:
    from hvd_greco.demo.data import load_text, split_text

    return split_text(load_text())[0]


class WordModel(nn.Module):
    """A word-level transformer: embedding and head of 5 M parameters each, 3 M between them."""

    def __init__(self, vocabulary: int, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: torch.Tensor = self.head(self.body(self.embedding(x), mask=mask))
        return logits


def _words() -> tuple[Callable[[], nn.Module], Callable[[int], Batches]]:
    tokens = re.findall(rb"\w+|[^\w\s]", b"\n".join(_pieces()))
    # Real text has fewer words than a model of this size is used for: the rest is never seen.
    known = {word: i for i, word in enumerate(dict.fromkeys(tokens))}
    text = torch.tensor([known[word] for word in tokens])
    vocabulary = max(20_000, len(known))

    def batches(rank: int) -> Batches:
        generator = torch.Generator().manual_seed(rank)
        while True:
            at = torch.randint(len(text) - 33, (8,), generator=generator)
            windows = torch.stack([text[i : i + 33] for i in at])
            yield (
                lambda model, w=windows: nn.functional.cross_entropy(  # type: ignore[misc]
                    model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()
                )
            )

    return lambda: WordModel(vocabulary), batches


def _digits() -> tuple[Callable[[], nn.Module], Callable[[int], Batches]]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)

    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def batches(rank: int) -> Batches:
        generator = torch.Generator().manual_seed(rank)
        while True:
            at = torch.randint(len(y), (32,), generator=generator)
            yield lambda model, i=at: nn.functional.cross_entropy(  # type: ignore[misc]
                model(x[i]), y[i]
            )

    return build, batches


TASKS: dict[str, Callable[[], Task]] = {
    "text transformer, 0.13 M": lambda: Task(*_text(), interval=100, lr=0.5),
    "word transformer, 13 M": lambda: Task(*_words(), interval=20, lr=0.1),
    "CNN on digits, 0.15 M": lambda: Task(*_digits(), interval=100, lr=0.05),
}


def record(task: Task, family: str, intervals: int) -> list[greco.Evidence]:
    """Train with the uniform default; the evidence of every interval."""
    recorder = Recorder()
    # Modules are built from the global generator's seed.
    building = threading.Lock()

    def program(member: LocalMember) -> None:
        torch.set_num_threads(1)
        with building:
            model = task.build()
        named = list(model.named_parameters())
        compression = greco.LGreco(
            named, family=family, default=FAMILIES[family], interval=task.interval,
            policy=recorder, group=member,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=0.5)
        batches = task.batches(member.rank)
        for _ in range(task.interval * intervals):
            optimizer.zero_grad()
            next(batches)(model).backward()
            member.reduce_gradients(named, compression)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    greco.LocalGroup(RANKS, stall=120.0).run(program)
    return recorder.seen


# -- comparison -----------------------------------------------------------------------------------


def compare(evidence: greco.Evidence, family: str) -> dict[str, Any]:
    """Bytes of all contenders on one interval's records."""
    rows = np.arange(len(evidence.options))
    bytes_, errors, defaults = evidence.bytes, evidence.errors, evidence.defaults
    budget = float(errors[rows, defaults].sum())
    others = evidence.other_bytes

    def total(choice: np.ndarray) -> float:
        return float(bytes_[rows, choice].sum()) + others

    found: dict[str, Any] = {"uniform": total(defaults)}
    ours = solve.hull(Problem(bytes_, errors, budget))
    found["ours"] = total(ours)
    best = solve.exact(Problem(bytes_, errors, budget))
    found["exact"] = total(best)
    codecs = _codecs(evidence)
    if family != "auto":
        found.update(_paper(evidence, family, total))
        return found
    # At the error that each family's own default would have: all methods beside each alone.
    for reference, level in SINGLES.items():
        limit = float(errors[rows, _places(evidence, reference, level)].sum())
        at: dict[str, Any] = {"auto": total(solve.hull(Problem(bytes_, errors, limit)))}
        for name in SINGLES:
            mine = np.isin(codecs, (name, "skip", "dense"))
            problem = Problem(np.where(mine, bytes_, np.inf), errors, limit)
            at[name] = total(solve.exact(problem))
        found[f"at the error of {reference}"] = at
    return found


def _places(evidence: greco.Evidence, codec: str, level: float) -> np.ndarray:
    """Each layer's option of that codec and level; dense where it has none."""
    wanted = Assignment(codec, level)
    return np.array(
        [
            each.place(wanted) if wanted in each.assignments else each.dense
            for each in evidence.options
        ]
    )


def _codecs(evidence: greco.Evidence) -> np.ndarray:
    most = max(len(each.assignments) for each in evidence.options)
    return np.array(
        [
            [a.codec for a in each.assignments] + [""] * (most - len(each.assignments))
            for each in evidence.options
        ]
    )


def _paper(
    evidence: greco.Evidence, family: str, total: Callable[[np.ndarray], float]
) -> dict[str, Any]:
    """The paper's metric and programme; its squared error is told beside its bytes."""
    rows = np.arange(len(evidence.options))
    bytes_, errors, defaults = evidence.bytes, evidence.errors, evidence.defaults
    allowed = _codecs(evidence) != "skip"
    if family in ("powersgd", "acp"):
        rank = FAMILIES[family]
        for row, each in enumerate(evidence.options):
            for place, assignment in enumerate(each.assignments):
                level = assignment.level
                if level is not None and not rank / 2 <= level <= 2 * rank:
                    allowed[row, place] = False
    norms = np.where(allowed, np.sqrt(errors), np.inf)
    limit = float(np.sqrt(errors)[rows, defaults].sum())
    try:
        choice = solve.rounding_up(Problem(np.where(allowed, bytes_, np.inf), norms, limit))
    except InfeasibleError:
        return {"paper": None, "paper error": None}
    return {
        "paper": total(choice),
        "paper error": float(errors[rows, choice].sum() / errors[rows, defaults].sum()),
    }


def _beside(interval: dict[str, Any], reference: str) -> float:
    """Bytes of the best single family by those of all together, at that family's error."""
    at = interval[f"at the error of {reference}"]
    return float(min(at[name] for name in SINGLES) / at["auto"])


def table(result: dict[str, Any]) -> str:
    """The records as Markdown: medians over intervals."""
    lines = [
        "| model | family | uniform (bytes) | ours, times fewer | exact | the paper's | its "
        "squared error | best single family by auto, at the error of |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def ratio(intervals: list[dict[str, Any]], key: str) -> str:
        values = [each["uniform"] / each[key] for each in intervals if each.get(key)]
        if not values:
            return "-"
        low, high = min(values), max(values)
        return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"

    for model, families in result["models"].items():
        for family, intervals in families.items():
            uniform = statistics.median(each["uniform"] for each in intervals)
            errors = [each["paper error"] for each in intervals if each.get("paper error")]
            paper_error = f"{statistics.median(errors):.2f}" if errors else "-"
            single = "-"
            if family == "auto":
                single = "; ".join(
                    f"{statistics.median(_beside(each, name) for each in intervals):.2f} ({name})"
                    for name in SINGLES
                )
            lines.append(
                f"| {model} | {family} | {uniform:,.0f} | {ratio(intervals, 'ours')} | "
                f"{ratio(intervals, 'exact')} | {ratio(intervals, 'paper')} | {paper_error} | "
                f"{single} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Record, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--intervals", type=int, default=3)
    parser.add_argument("--models", nargs="+", help="parts of names; default: all")
    parser.add_argument("--output", help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for name, make in TASKS.items():
        if arguments.models and not any(part in name for part in arguments.models):
            continue
        task = make()
        models[name] = {}
        for family in FAMILIES:
            seen = record(task, family, arguments.intervals)
            models[name][family] = [compare(each, family) for each in seen]
            print(name, family, models[name][family][-1], flush=True)
    command = "python benchmarks/lgreco_gain.py"
    if arguments.output:
        command += f" --output {arguments.output}"
    result = {"command": command, "ranks": RANKS, "torch": torch.__version__, "models": models}
    print(table(result))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
