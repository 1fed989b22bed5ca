"""autopar: one line turns a single-device PyTorch model into a distributed one.

>>> import torch, autopar
>>> layer = torch.nn.Linear(8, 8)
>>> report = autopar.verify(layer, autopar.Mesh((2,)), example_inputs=torch.ones(4, 8))
>>> report.ok
True
"""

from autopar import errors, nn, optim, search
from autopar.api import compile, make_plan, run_virtual, verify
from autopar.mesh import Devices, Mesh
from autopar.plan import Plan
from autopar.planner.constraints import Constraint
from autopar.recording import Recording
from autopar.runtime.clip import clip_grad_norm_
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.virtual_run import VirtualRun
from autopar.sharding.check_rule import check_rule
from autopar.sharding.registry import register_rule
from autopar.verification import Report
from autopar.version import __version__

__all__ = [
    "Constraint",
    "Devices",
    "Mesh",
    "ParallelModule",
    "Plan",
    "Recording",
    "Report",
    "VirtualRun",
    "__version__",
    "check_rule",
    "clip_grad_norm_",
    "compile",
    "errors",
    "make_plan",
    "nn",
    "optim",
    "register_rule",
    "run_virtual",
    "search",
    "verify",
]
