"""CUDA kernels: ``.cu`` files, how they are compiled, and how they are launched through CuPy.

Importing this package needs neither CuPy nor a GPU; :mod:`.launch` imports CuPy at the first call.
"""
