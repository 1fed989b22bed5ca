"""The version of the package, read by setuptools and written into every plan."""

__version__ = "0.1.0"
