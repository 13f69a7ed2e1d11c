"""Microbenchmarks of the operation table: ``hvd-greco bench kernels``.

``case`` says what is measured (an operation, its counted bytes, a chain of torch calls that does
the same), ``sparse``, ``quantisers`` and ``low_rank`` are the operations, ``timing``, ``memory``
and ``starts`` measure, ``record`` is what a run leaves, and ``report`` and ``plot`` show it.
``options`` checks what the user asked for, without torch.
"""
