"""Codecs: pure tensor maths between a gradient and the bytes that travel.

A codec does not communicate, has no global state and knows nothing of Horovod. To add one, write
a module here with a subclass of :class:`~hvd_greco.codecs.base.Codec` and name it in
:mod:`hvd_greco.methods`.
"""
