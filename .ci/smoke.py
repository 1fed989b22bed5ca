"""An installed wheel works away from the repository: it is whole, it is alone at the top level, and it plans."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

import autopar

HERE = Path(sys.prefix)

assert HERE in Path(autopar.__file__).parents, f"imported from {autopar.__file__}, not from the wheel"

shipped = {str(path) for path in importlib.metadata.files("autopar") or ()}
top_level = {path.split("/")[0] for path in shipped if not path.startswith("..")}
assert top_level == {"autopar", f"autopar-{autopar.__version__}.dist-info"}, top_level
assert "autopar/cost_models/profiles/h100.json" in shipped
assert "autopar/py.typed" in shipped
assert importlib.util.find_spec("passes") is None
assert importlib.util.find_spec("cost_models") is None

modules = sorted(path.removesuffix(".py").replace("/", ".") for path in shipped if path.endswith(".py"))
for name in modules:
    if not name.endswith(("__init__", "__main__")):
        importlib.import_module(name)

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
plan = autopar.make_plan(model, (2,), example_inputs=torch.randn(8, 16))
assert plan.step_s > 0
print(plan)

print(f"autopar {autopar.__version__}: {len(modules)} modules import from the wheel")
