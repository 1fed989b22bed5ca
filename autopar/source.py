"""From a frame or a traceback to the user's own line."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

import torch

_TORCH = str(Path(torch.__file__).parent)
_AUTOPAR = str(Path(__file__).resolve().parent)
_FAKE_KERNELS = str(Path(_TORCH) / "_subclasses" / "fake_tensor.py")  # below it run the fakes that users register
_OWN = (_TORCH, _AUTOPAR, str(Path(_AUTOPAR).parent / "passes"), "<")
_PYTHON = sysconfig.get_path("stdlib")
_INSTALLED = str(Path(_PYTHON) / "site-packages")  # by default they lie in the folder of Python's own modules


def is_user_file(filename: str) -> bool:
    """Whether a file belongs to neither PyTorch nor autopar nor Python itself."""
    return not filename.startswith(_OWN) and (not filename.startswith(_PYTHON) or filename.startswith(_INSTALLED))


def describe(filename: str, line: int, function: str) -> str:
    """`model.py:58 in forward: idx = mask.nonzero()`."""
    text = linecache.getline(filename, line).strip()
    place = f"{Path(filename).name}:{line} in {function}"
    return f"{place}: {text}" if text else place


_TRACER = str(Path(_AUTOPAR) / "capture" / "trace.py")


def calling_line() -> tuple[str, int, str] | None:
    """(file, line, function) of the innermost frame of the user's model on the stack of a trace.

    None when the ops come from PyTorch's own modules alone, with no line of the model's between.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def raising_line(traceback: TracebackType | None) -> str:
    """The innermost line of the user's in a traceback, described; "" if there is none.

    Of an op that the user defined it is the line that calls it, not one of its fake.
    """
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if found and code.co_filename == _FAKE_KERNELS:
            return found
        if is_user_file(code.co_filename):
            found = describe(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found
