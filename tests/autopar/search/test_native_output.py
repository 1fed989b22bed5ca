"""What native code prints while a problem is solved does not stand among the answer."""

from __future__ import annotations

import os
import sys

import pytest

from autopar.search.native_output import native_output_on_stderr


def test_descriptor_one_leads_to_stderr_inside_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with native_output_on_stderr():
        os.write(1, b"note\n")
    print("answer")
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert (out, err) == ("answer\n", "note\n")
