"""The table of FedAvg and the methods that cut widths on Fashion-MNIST, and what explains it.

python -m benchmarks.fashion_mnist.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.model_search.run import DISTILLED, SEARCH
from benchmarks.studies import Figures, Study, accuracy, main
from benchmarks.tables import markdown, write_between

HERE = Path(__file__).resolve().parent

# `five-widths.toml` gives devices what the method needs for a width. The search and FjORD need more for it than
# HeteroFL: with the fleet that follows they get the memory that HeteroFL's widths take.
SAME_MEMORY = [f"fleet={HERE.parent / 'methods_that_win' / 'same-memory-fleet.toml'}"]
WIDTHS_SEARCHED = [*SAME_MEMORY, *SEARCH, "model-search.shares=0.0625, 0.125, 0.25, 0.5, 1"]

METHODS = {
    "all-large": ["strategy=fedavg", "fedavg.use=all-large"],
    "fedprox": ["strategy=fedprox"],
    "fedadam": ["strategy=fedadam"],
    "heterofl": ["strategy=heterofl"],
    "fedrolex": ["strategy=fedrolex"],
    "federated-dropout": ["strategy=federated-dropout"],
    # FjORD on the widths of the methods above, and on the memory that HeteroFL's widths take. There no device can
    # train the whole network.
    "fjord": ["strategy=fjord", "fjord.distillation=false"],
    "fjord-same-memory": [*SAME_MEMORY, "strategy=fjord", "fjord.distillation=false"],
    "anycostfl": ["strategy=anycostfl"],
    # Our exact search and HeteroFL's way to train, without and with distillation on the server.
    "search": WIDTHS_SEARCHED,
    "search-distilled": [*WIDTHS_SEARCHED, *DISTILLED],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive"],
    # Scoring 100 devices' own models on the test set costs more than training them: twice is enough.
    "local": ["strategy=local", "evaluate-every=50"],
}
# Why is FedRolex below HeteroFL? Three times as long; without devices that train the whole model, which is what
# FedRolex is for; that six times as long; and with smaller steps.
LONG = ["rounds=300", "schedule.decay-rounds=180, 255", "evaluate-every=20"]
NO_LARGE = [f"fleet={HERE / 'no-large.toml'}"]
NO_LARGE_LONG = [*NO_LARGE, "rounds=600", "schedule.decay-rounds=360, 510", "evaluate-every=40"]
ABLATIONS = {"long": LONG, "no-large": NO_LARGE, "no-large-long": NO_LARGE_LONG, "slow": ["learning-rate=0.01"]}
for name, settings in ABLATIONS.items():
    for method in ("heterofl", "fedrolex"):
        METHODS[f"{name}-{method}"] = [f"strategy={method}", *settings]

STUDY = Study(HERE / "table.toml", METHODS, once=tuple(f"{name}-" for name in ABLATIONS))


def delivered(seed: Mapping[str, Any], tiers: int) -> float:
    """Return what devices of so many tiers would be given, 0 to 1: as recorded, or the mean of the tiers' scores."""
    return seed.get("delivered_score", sum(seed["score_by_tier"].values()) / tiers)


def delivered_table(results: dict[str, Figures]) -> str:
    """What devices would be given: as recorded, or from the scores of tiers where it was not kept yet.

    A tier's devices would be given the sub-model of its width, and all tiers have as many devices. One without a model
    counts as a device that knows nothing.
    """
    rows = []
    for method, seeds in results.items():
        tiers = 4 if method.startswith("no-large-") else 5
        scores = [[*f["score_by_tier"].values()] + [0.0] * (tiers - len(f["score_by_tier"])) for f in seeds.values()]
        worst = [f.get("worst_tier_score", min(run)) for f, run in zip(seeds.values(), scores, strict=True)]
        cells = [accuracy([delivered(f, tiers) for f in seeds.values()]), accuracy(worst)]
        rows.append([method, str(len(seeds)), *cells])
    return markdown(["method", "seeds", "delivered", "worst tier"], rows)


if __name__ == "__main__":
    main([STUDY], __doc__ or "")
    recorded = {method: seeds for method, seeds in STUDY.known().items() if seeds}
    print(write_between(HERE / "README.md", "delivered", delivered_table(recorded)))
