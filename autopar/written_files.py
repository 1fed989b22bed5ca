"""Files that a user asks for by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import FileWriteError


@contextmanager
def written_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a file that is written inside. Raises FileWriteError where the system does not let it be."""
    try:
        yield Path(path)
    except OSError as error:
        raise FileWriteError(
            f"the file cannot be written: {error.strerror or error}",
            where=os.fspath(path),
            fix="name a file in a folder that exists and that you may write to",
        ) from error
