"""RecipFL and the methods that it compares with, on a third data set: activities from phone sensors.

python -m benchmarks.recipfl.hapt [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks.recipfl.run import NO_TRANSFER, PUBLISHED
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
METHODS = {
    # What there is to teach: the large model on all devices, whatever their links, and the small one on all.
    "all-large": ["strategy=fedavg"],
    "all-small": ["strategy=fedavg", "family=vgg", "family-arguments=block_channels = [4, 4, 8, 16]", "widths=1"],
    # A federation of the large model and one of the small model.
    "exclusive": ["strategy=fedavg", "fedavg.use=affordable"],
    "exclusive-both": ["strategy=fedavg", "fedavg.use=affordable", "both-models=true"],
    "recipfl": PUBLISHED,
    # The hypernetwork that section 3.2 prints, which is the default.
    "recipfl-printed": ["strategy=recipfl"],
    "recipfl-no-transfer": NO_TRANSFER,
}

STUDY = Study(
    HERE / "hapt.toml",
    {method: [f"fleet={HERE / 'transfer-fleet.toml'}", *sets] for method, sets in METHODS.items()},
    general=False,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
