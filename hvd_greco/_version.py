"""The version, in one place: the build, the command line and run records read it here."""

__version__ = "0.1.0"
