"""Mixture-of-experts layers in plain PyTorch: written for one device, distributed like any other model.

>>> import torch, autopar
>>> gate = autopar.nn.TopKGate(16, num_experts=4, k=2)
>>> layer = autopar.nn.MixtureOfExperts(gate, autopar.nn.Experts(4, 16, 32))
>>> report = autopar.verify(layer, autopar.Mesh((2,)), example_inputs=torch.randn(8, 16))
>>> report.ok
True
"""

from autopar.nn.experts import Experts, FeedForward
from autopar.nn.gates.balanced import BalancedGate
from autopar.nn.gates.expert_choice import ExpertChoiceGate
from autopar.nn.gates.gate import Gate
from autopar.nn.gates.gshard import GShardGate
from autopar.nn.gates.noisy_top_k import NoisyTopKGate
from autopar.nn.gates.sigmoid import GroupLimit, SigmoidGate
from autopar.nn.gates.switch import SwitchGate
from autopar.nn.gates.top_k import TopKGate
from autopar.nn.mixture import MixtureOfExperts
from autopar.nn.routing import Routing

__all__ = [
    "BalancedGate",
    "ExpertChoiceGate",
    "Experts",
    "FeedForward",
    "GShardGate",
    "Gate",
    "GroupLimit",
    "MixtureOfExperts",
    "NoisyTopKGate",
    "Routing",
    "SigmoidGate",
    "SwitchGate",
    "TopKGate",
]
