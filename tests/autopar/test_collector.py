"""The collector is as it was on leaving."""

from __future__ import annotations

import gc

import pytest

from autopar.collector import collector_paused


@collector_paused()
def is_enabled() -> bool:
    return gc.isenabled()


def test_the_collector_rests_inside_and_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    assert not is_enabled()
    assert not is_enabled()  # a decorator serves every call
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_user_stopped_stays_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
