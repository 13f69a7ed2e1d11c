"""Which layer a tensor belongs to: Horovod passes a tensor, and neither a name nor a step.

Inside Horovod's hook ``parameter.grad is tensor`` holds, so identity decides, and is verified on
every look-up: ``id()`` and ``data_ptr()`` are recycled, and serve as hints only. With
``sparse_as_dense=True`` the tensor is a fresh dense copy; then the parameter is the one that
Horovod's calling frame names, or else the one whose accumulation hook ran last.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .buffers import Buffers
from .errors import UnknownTensorError, UnsupportedError
from .layers import Layer, LayerState


class Slot:
    """One layer in one compressor: the parameter, its state, and marks of the current step."""

    def __init__(self, layer: Layer, parameter: torch.Tensor) -> None:
        self.layer = layer
        self.parameter = parameter
        self.state = LayerState()
        self.buffers = Buffers()
        #: A backward pass has written the gradient since it was last compressed.
        self.fresh = False
        #: Where the last reduced gradient lies, and the parameter's version at that time.
        self.reduced_at: tuple[int, int] | None = None

    def mark_reduced(self, gradient: torch.Tensor) -> None:
        """Remember that ``gradient`` was reduced before the optimizer changed the parameter."""
        self.reduced_at = (gradient.data_ptr(), self.parameter._version)

    def already_reduced(self, gradient: torch.Tensor) -> bool:
        """Whether this is the gradient we returned, the parameter being unchanged since."""
        if self.reduced_at is None or self.reduced_at[1] != self.parameter._version:
            return False
        # Of a sparse gradient we only ever see fresh dense copies; then the version decides.
        sparse = self.parameter.grad is not None and self.parameter.grad.is_sparse
        return sparse or self.reduced_at[0] == gradient.data_ptr()


class Directory:
    """All layers of a compressor, found by their gradients."""

    def __init__(self, pairs: list[tuple[str, torch.Tensor]], watch: bool = True) -> None:
        self.slots = [
            Slot(Layer(index, name, tuple(parameter.shape), parameter.dtype), parameter)
            for index, (name, parameter) in enumerate(pairs)
        ]
        #: Slots whose parameters get gradients: what a whole step can consist of.
        self.trainable = frozenset(
            slot.layer.name for slot in self.slots if slot.parameter.requires_grad
        )
        self._by_gradient: dict[int, Slot] = {}
        self._current: Slot | None = None
        # Runs just before Horovod's own hook for the same parameter.
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot))
            for slot in self.slots
            if watch and slot.parameter.requires_grad
        ]
        #: The order of the last step, which the next one mostly repeats, and the place in it.
        self._order: list[Slot] = []
        self._found: list[Slot] = []

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def forget(self) -> None:
        """Drop the hints of a finished step; most gradients are new tensors in the next."""
        self._by_gradient.clear()
        self._order, self._found = self._found, []

    def reshape(self) -> list[tuple[Layer, Layer]]:
        """Begin anew with every layer whose parameter has another shape or dtype than it had.

        Its state is dropped: residuals and warm starts say nothing of a tensor of another shape.
        A change of dtype alone keeps it, as long as it is worked on in the same one.

        Returns:
            What each of those layers was and is now.
        """
        changes = []
        for slot in self.slots:
            old, parameter = slot.layer, slot.parameter
            if parameter.shape == old.shape and parameter.dtype == old.dtype:
                continue
            slot.layer = Layer(old.index, old.name, tuple(parameter.shape), parameter.dtype)
            if slot.layer.shape != old.shape or slot.layer.work_dtype != old.work_dtype:
                slot.state = LayerState()
                slot.buffers = Buffers()
            changes.append((old, slot.layer))
        return changes

    def _make_hook(self, slot: Slot) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            slot.fresh = True
            self._current = slot
            self._by_gradient[id(parameter.grad)] = slot

        return hook

    def find(self, tensor: torch.Tensor) -> Slot:
        """The slot whose gradient ``tensor`` is.

        Raises:
            UnknownTensorError: it is not the gradient of a parameter we were given.
            UnsupportedError: it is a parameter (Adasum), or a sparse tensor.
        """
        if tensor.is_sparse:
            raise UnsupportedError(
                f"a sparse gradient of shape {tuple(tensor.shape)} was passed for compression: "
                "with groups=, Horovod does not make it dense. Leave groups out, or use "
                "Embedding(sparse=False)"
            )
        slot = self._by_gradient.get(id(tensor))
        if slot is None and len(self._found) < len(self._order):
            slot = self._order[len(self._found)]
        if slot is not None and slot.parameter.grad is tensor:
            self._found.append(slot)
            return slot
        for slot in self.slots:
            if slot.parameter.grad is tensor:
                self._by_gradient[id(tensor)] = slot
                self._found.append(slot)
                return slot
        found = self._sparse_parent(tensor)
        if found is not None:
            return found
        raise self._unknown(tensor)

    def _sparse_parent(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose sparse gradient ``tensor`` is a dense copy of."""
        # compress <- Horovod's _allreduce_grad_async(self, p): its frame tells which of several
        # sparse parameters of one shape this is. It comes first, since in synchronize() (half a
        # window of backward passes, for one) the hook that ran last says nothing.
        frame: Any = sys._getframe(1)
        for _ in range(6):
            frame = frame.f_back
            if frame is None:
                break
            named = frame.f_locals.get("p")
            if isinstance(named, torch.Tensor) and _is_dense_copy(tensor, named):
                return next((slot for slot in self.slots if slot.parameter is named), None)
        current = self._current
        if current is not None and _is_dense_copy(tensor, current.parameter) and current.fresh:
            return current
        return None

    def _unknown(self, tensor: torch.Tensor) -> Exception:
        for slot in self.slots:
            if slot.parameter is tensor:
                return UnsupportedError(
                    f"layer {slot.layer.name!r}: op=hvd.Adasum passes weights after a local "
                    "optimizer step, not gradients, and adds them adaptively; what a compressor "
                    "leaves out of them would be lost. Use op=hvd.Average or hvd.Sum"
                )
        names = ", ".join(slot.layer.name for slot in self.slots[:3])
        return UnknownTensorError(
            f"a tensor of shape {tuple(tensor.shape)} is not the gradient of any of the "
            f"{len(self.slots)} parameters this compressor was given ({names}, ...). Pass "
            "model.named_parameters() of the model whose parameters the optimizer holds, and make "
            "the compressor after the model has its final parameters"
        )


def calling_optimizer() -> torch.optim.Optimizer | None:
    """The optimizer on whose behalf we are called: Horovod's frames name it ``self``."""
    frame: Any = sys._getframe(1)
    for _ in range(10):
        frame = frame.f_back
        if frame is None:
            break
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return owner
    return None


def _is_dense_copy(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    return (
        gradient is not None
        and gradient.is_sparse
        and not tensor.is_sparse
        and gradient.shape == tensor.shape
        and gradient.dtype == tensor.dtype
    )
