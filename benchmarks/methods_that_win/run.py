"""Which method delivers most: methods of one global model on twins of the model-search paper's settings.

    python -m benchmarks.methods_that_win.run resnet6|vit [--jobs 1] [--seeds 1 2 3] [--methods NAME ...]

Needs the link traces in ../shared/traces, beside the project's folder.
"""

import sys
from pathlib import Path

from benchmarks.method_table import Study, main

HERE = Path(__file__).resolve().parent
TWINS = ("resnet6", "vit")

METHODS = {
    "all-large": ["strategy=fedavg", "fedavg.use=all-large"],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "heterofl": ["strategy=heterofl"],
    "fedrolex": ["strategy=fedrolex"],
    "fjord": ["strategy=fjord"],
    "model-search": ["strategy=model-search"],
    "wildflower": ["strategy=wildflower"],
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TWINS:
        sys.exit(__doc__)
    twin = sys.argv.pop(1)
    main(Study(HERE / f"{twin}.toml", METHODS, tiers=False), __doc__ or "")
