"""Optimizers of little state that compute, on sharded parameters, exactly what they compute on one device."""

from autopar.optim.adafactor import Adafactor
from autopar.optim.adam_8bit import Adam8bit, AdamW8bit
from autopar.optim.host_state import HostState
from autopar.optim.sharded_state import ShardedState
from autopar.optim.sm3 import SM3

__all__ = ["SM3", "Adafactor", "Adam8bit", "AdamW8bit", "HostState", "ShardedState"]
