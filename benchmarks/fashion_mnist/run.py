"""The table of FedAvg and the methods that cut widths on Fashion-MNIST, and what explains it.

python -m benchmarks.fashion_mnist.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent

METHODS = {
    "all-large": ["strategy=fedavg", "fedavg.use=all-large"],
    "fedprox": ["strategy=fedprox"],
    "fedadam": ["strategy=fedadam"],
    "heterofl": ["strategy=heterofl"],
    "fedrolex": ["strategy=fedrolex"],
    "federated-dropout": ["strategy=federated-dropout"],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive"],
    # Scoring 100 devices' own models on the test set costs more than training them: twice is enough.
    "local": ["strategy=local", "evaluate-every=50"],
}
# Why is FedRolex below HeteroFL? Three times as long; without devices that train the whole model, which is what
# FedRolex is for; that six times as long; and with smaller steps.
LONG = ["rounds=300", "decay-rounds=180, 255", "evaluate-every=20"]
NO_LARGE = [f"fleet={HERE / 'no-large.toml'}"]
NO_LARGE_LONG = [*NO_LARGE, "rounds=600", "decay-rounds=360, 510", "evaluate-every=40"]
ABLATIONS = {"long": LONG, "no-large": NO_LARGE, "no-large-long": NO_LARGE_LONG, "slow": ["learning-rate=0.01"]}
for name, settings in ABLATIONS.items():
    for method in ("heterofl", "fedrolex"):
        METHODS[f"{name}-{method}"] = [f"strategy={method}", *settings]

STUDY = Study(HERE / "table.toml", METHODS, once=tuple(f"{name}-" for name in ABLATIONS))

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
