"""HypeMeFed's experiments on Fashion-MNIST, and on HAPT's phone sensors.

python -m benchmarks.hypemefed.run STUDY [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]

STUDY is preliminary, ten-exits, hapt, fills, by-user or ranks.
"""

from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.runs import rounds_of
from benchmarks.studies import Figures, Study, figures, main, table
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
ERRORS = ("guess_error", "rank_floor", "stale_error")
ONE_EXIT = "family-arguments="
CHANGES = ["strategy=hypemefed", "hypemefed.guess=change", "hypemefed.epochs=5"]  # ours: of changes from changes
WEIGHTS = ("hypemefed.guess=weight", "hypemefed.epochs=25")  # of weights from weights for 25 epochs, as in the paper
# Controls and variants of ours are plug-ins, which lie beside the experiments: hypemefed_controls.py.
CONTROLS = "strategy=hypemefed_controls"
OWNERS, STALE, AVERAGE = f"{CONTROLS}:Owners", f"{CONTROLS}:Stale", f"{CONTROLS}:MovingAverage"
ALL = "hypemefed-controls.generate=all"
CONTROL_OF_CHANGES = ["hypemefed-controls.guess=change", "hypemefed-controls.epochs=5"]
CONTROL_OF_WEIGHTS = ["hypemefed-controls.guess=weight", "hypemefed-controls.epochs=25"]
PRELIMINARY = {
    "all-large": ["strategy=fedavg", ONE_EXIT],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive", ONE_EXIT],
    "exits and hypernetworks": CHANGES,
    # Norms, biases and heads as well, the paper's Figure 10.
    "exits and hypernetworks, all": [*CHANGES, "hypemefed.generate=all"],
    "exits and hypernetworks, weights": ["strategy=hypemefed", *WEIGHTS],
    "exits": [OWNERS],
    "hypernetworks": [f"{CONTROLS}:DeepestExit", *CONTROL_OF_CHANGES],
    "hypernetworks, weights": [f"{CONTROLS}:DeepestExit", *CONTROL_OF_WEIGHTS],
    "neither": [f"{CONTROLS}:DeepestExitOwners"],
    "exits, stale layers": [STALE],
    # The control of the row with all guesses: an average of the past, which knows nothing of the device.
    "exits, moving average of all": [AVERAGE, ALL],
}
# On data where what a device changed in one layer says something of the next (guesses.py).
FEW_CLASSES = ["partition=dirichlet", "alpha=0.1"]
PRELIMINARY |= {
    f"{name}, few classes": [*PRELIMINARY[name], *FEW_CLASSES]
    for name in (
        *("all-large", "all-small", "exclusive"),
        *("exits and hypernetworks", "exits and hypernetworks, all", "exits"),
        *("exits, stale layers", "exits, moving average of all"),
    )
}
TEN = {
    "one exit, all-large": ["strategy=fedavg", ONE_EXIT],
    "one exit, all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "one exit, exclusive": ["strategy=fedavg", "fedavg.use=exclusive", ONE_EXIT],
    # Those of tier "exit 10" alone, as if nine heads that nobody trains had to be paid for.
    "one exit, five devices": ["strategy=fedavg", "fedavg.use=exclusive"],
    "ten exits and hypernetworks": CHANGES,
    "ten exits": [OWNERS],
    "ten exits, every device trains all": [*CHANGES, "fleet=" + str(HERE / "all-fleet.toml")],
}
# The whole network without early heads.
VGG = "family-arguments=block_channels = [64, 128, 256, 512]"
# As many devices take batch norm statistics as a round has, over all that they hold, which was the default then.
SIX_DEVICES = ("statistics.devices=6", "statistics.examples=0")
ON_HAPT = {
    "hypemefed": CHANGES,
    "hypemefed, all": [*CHANGES, "hypemefed.generate=all"],
    "hypemefed without hypernetworks": [OWNERS],
    "fedavg-s": ["strategy=fedavg", "fedavg.use=all-small"],
    "fedavg-l": ["strategy=fedavg", VGG],
    "heterofl": ["strategy=heterofl", *SIX_DEVICES, VGG],
    "fedrolex": ["strategy=fedrolex", *SIX_DEVICES, VGG],
    # Both as they were before the papers' settings became the defaults.
    "depthfl": ["strategy=depthfl", "depthfl.ramp-rounds=60", "depthfl.alpha=0", "depthfl.scored=deepest"],
    "scalefl": ["strategy=scalefl", "scalefl.gamma=0"],
}
PARTITIONS = {"dirichlet": "dirichlet", "by user": "natural"}
HAPT = {
    f"{method}, {how}": [f"partition={partition}", *sets]
    for how, partition in PARTITIONS.items()
    for method, sets in ON_HAPT.items()
}
# What stands for the layers that a device lacks, with noisy owners.
FILLS = {
    "owners": [OWNERS],
    "weights": ["strategy=hypemefed", *WEIGHTS],
    "weights, sent bases": [f"{CONTROLS}:SentBases", *CONTROL_OF_WEIGHTS],
    "weights, shifted": [f"{CONTROLS}:Shifted", *CONTROL_OF_WEIGHTS],
    "changes": CHANGES,
    "changes, all": [*CHANGES, "hypemefed.generate=all"],
    "stale": [STALE],
    "ema": [AVERAGE],
    "ema, all": [AVERAGE, ALL],
}
NOISY = {
    f"{fill}, Dirichlet {alpha}": ["partition=dirichlet", f"alpha={alpha}", *sets]
    for alpha in (0.1, 0.5)
    for fill, sets in FILLS.items()
}
# The same where every device holds what one user did. All-small and all-large are the bounds: the part up to the first
# exit, and the whole network, on all devices.
BY_USER = {
    "all-large": ["strategy=fedavg", ONE_EXIT],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
} | FILLS
# The paper's guesses, of a rank that keeps as much of this network as 100 keeps of UniMiB's, and of full rank.
MEASURED = [f"{CONTROLS}:MeasuredGuesses", *CONTROL_OF_WEIGHTS]
RANKS = {
    "owners": [OWNERS],
    "stale": [STALE],
    "weights, rank 16": [*MEASURED, "hypemefed-controls.rank=16"],
    "weights, full rank": [*MEASURED, "hypemefed-controls.rank=100"],
}
ONCE = ("exits-and-hypernetworks-weights", "hypernetworks-weights")  # with the first seed only


def with_errors(folder: Path) -> dict:
    """A run's figures, and by layer the errors of guesses: means over the second half of its rounds."""
    rounds = rounds_of(folder)
    found: dict[str, dict[str, list[float]]] = {}
    for record in rounds[len(rounds) // 2 :]:
        for name, value in record["metrics"].items():
            tensor, kind = name.split()
            found.setdefault(tensor.partition(".")[0], {}).setdefault(kind, []).append(value)
    return figures(folder) | {"errors": {at: {kind: mean(v) for kind, v in of.items()} for at, of in found.items()}}


def table_with_errors(study: Study, results: dict[str, Figures]) -> str:
    """The results, and of each layer that is guessed the errors of guesses, of their rank and of what was sent."""
    rows = [
        [method, layer, *(f"{mean(run['errors'][layer][kind] for run in seeds.values()):.3f}" for kind in ERRORS)]
        for method, seeds in results.items()
        for layer in next(iter(seeds.values()))["errors"]
    ]
    heads = ["method", "layer", "error of guesses", "floor of the rank", "error of what was sent"]
    return "\n\n".join([table(study, results), *([markdown(heads, rows)] if rows else [])])


def study(name: str, methods: dict[str, list[str]]) -> Study:
    """A study with the fleet of its name."""
    fleet = f"fleet={HERE / f'{name}-fleet.toml'}"
    named = {method.replace(" ", "-").replace(",", ""): [fleet, *sets] for method, sets in methods.items()}
    whole = Study(HERE / f"{name}.toml", named, once=ONCE, part="hypernetworks")
    return replace(whole, figures=with_errors, table=table_with_errors) if name == "ranks" else whole


STUDIES = [
    study(name, methods)
    for name, methods in {
        "preliminary": PRELIMINARY,
        "ten-exits": TEN,
        "hapt": HAPT,
        "fills": NOISY,
        "by-user": BY_USER,
        "ranks": RANKS,
    }.items()
]

if __name__ == "__main__":
    main(STUDIES, __doc__ or "")
