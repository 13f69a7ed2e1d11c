"""Adaptive control: which method and level each layer uses, retuned while the job runs.

The parts, each of which knows only what stands before it: :mod:`.solve` (pure functions: which
option of each layer, given costs, errors and a budget), :mod:`.curves` (what a layer's options
are, and what each would lose), :mod:`.statistics` (sums over an interval and over ranks),
:mod:`.policy` (decisions), :mod:`.journal` (the log of decisions) and :mod:`.controller` (when, and
how all ranks agree).
"""
