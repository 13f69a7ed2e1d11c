"""The demo job: a small byte-level transformer trained with stock Horovod, once per method.

``data`` and ``model`` define the job, ``config`` its settings, ``worker`` is what each rank runs,
``runner`` starts the ranks and shows what they report. Nothing here imports torch or Horovod
before the ranks start, so that bad options are refused in a fraction of a second.
"""
