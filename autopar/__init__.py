"""autopar: one line turns a single-device PyTorch model into a distributed one."""

from autopar.version import __version__

__all__ = ["__version__"]
