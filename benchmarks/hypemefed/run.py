"""HypeMeFed's experiments on Fashion-MNIST, and on HAPT's phone sensors.

python -m benchmarks.hypemefed.run STUDY [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]

STUDY is preliminary, ten-exits, hapt, fills or by-user.
"""

from pathlib import Path

from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
ONE_EXIT = "family-arguments="
CHANGES = ["strategy=hypemefed", "hypemefed.guess=change", "hypemefed.epochs=5"]  # ours: of changes from changes
WEIGHTS = ("hypemefed.guess=weight", "hypemefed.epochs=25")  # of weights from weights for 25 epochs, as in the paper
PRELIMINARY = {
    "all-large": ["strategy=fedavg", ONE_EXIT],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive", ONE_EXIT],
    "exits and hypernetworks": CHANGES,
    # Norms, biases and heads as well, the paper's Figure 10.
    "exits and hypernetworks, all": [*CHANGES, "hypemefed.generate=all"],
    "exits and hypernetworks, weights": ["strategy=hypemefed", *WEIGHTS],
    "exits": ["strategy=hypemefed", "hypemefed.fill=owners"],
    "hypernetworks": [*CHANGES, "hypemefed.exits=false"],
    "hypernetworks, weights": ["strategy=hypemefed", "hypemefed.exits=false", *WEIGHTS],
    "neither": ["strategy=hypemefed", "hypemefed.exits=false", "hypemefed.fill=owners"],
    "exits, stale layers": ["strategy=hypemefed", "hypemefed.fill=stale"],
    # The control of the row with all guesses: an average of the past, which knows nothing of the device.
    "exits, moving average of all": ["strategy=hypemefed", "hypemefed.fill=ema", "hypemefed.generate=all"],
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
    "ten exits": ["strategy=hypemefed", "hypemefed.fill=owners"],
    "ten exits, every device trains all": [*CHANGES, "fleet=" + str(HERE / "all-fleet.toml")],
}
# The whole network without early heads.
VGG = "family-arguments=block_channels = [64, 128, 256, 512]"
# As many devices take batch norm statistics as a round has, over all that they hold, which was the default then.
SIX_DEVICES = ("statistics.devices=6", "statistics.examples=0")
ON_HAPT = {
    "hypemefed": CHANGES,
    "hypemefed, all": [*CHANGES, "hypemefed.generate=all"],
    "hypemefed without hypernetworks": ["strategy=hypemefed", "hypemefed.fill=owners"],
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
    "owners": ["hypemefed.fill=owners"],
    "weights": [*WEIGHTS],
    "weights, sent bases": [*WEIGHTS, "hypemefed.sent-bases=true"],
    "weights, shifted": [*WEIGHTS, "hypemefed.sent-bases=true", "hypemefed.shift=true"],
    "changes": CHANGES[1:],
    "changes, all": [*CHANGES[1:], "hypemefed.generate=all"],
    "stale": ["hypemefed.fill=stale"],
    "ema": ["hypemefed.fill=ema"],
    "ema, all": ["hypemefed.fill=ema", "hypemefed.generate=all"],
}
NOISY = {
    f"{fill}, Dirichlet {alpha}": ["strategy=hypemefed", "partition=dirichlet", f"alpha={alpha}", *sets]
    for alpha in (0.1, 0.5)
    for fill, sets in FILLS.items()
}
# The same where every device holds what one user did. All-small and all-large are the bounds: the part up to the first
# exit, and the whole network, on all devices.
BY_USER = {
    "all-large": ["strategy=fedavg", ONE_EXIT],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
} | {fill: ["strategy=hypemefed", *sets] for fill, sets in FILLS.items()}
ONCE = ("exits-and-hypernetworks-weights", "hypernetworks-weights")  # with the first seed only


def study(name: str, methods: dict[str, list[str]]) -> Study:
    """A study with the fleet of its name."""
    fleet = f"fleet={HERE / f'{name}-fleet.toml'}"
    named = {method.replace(" ", "-").replace(",", ""): [fleet, *sets] for method, sets in methods.items()}
    return Study(HERE / f"{name}.toml", named, once=ONCE, part="hypernetworks")


STUDIES = [
    study(name, methods)
    for name, methods in {
        "preliminary": PRELIMINARY,
        "ten-exits": TEN,
        "hapt": HAPT,
        "fills": NOISY,
        "by-user": BY_USER,
    }.items()
]

if __name__ == "__main__":
    main(STUDIES, __doc__ or "")
