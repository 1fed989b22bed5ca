"""What solvers print from C++ goes to stderr, so that stdout holds the answer alone."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def native_output_on_stderr() -> Iterator[None]:
    """File descriptor 1 is a copy of descriptor 2 inside. HiGHS prints notes there that no option turns off."""
    sys.stdout.flush()
    _flush_native()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        _flush_native()
        os.dup2(kept, 1)
        os.close(kept)


def _flush_native() -> None:
    """C's own buffers; where there is no C library to ask, nothing is flushed."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
