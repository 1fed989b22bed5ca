"""Print the requirements of the extra `dev` without the package itself: linters need no PyTorch of their own."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
requirements = project["optional-dependencies"]["dev"]
print("\n".join(line for line in requirements if not line.startswith(project["name"])))
