"""RecipFL and the methods that it compares with, on a second data set: handwritten digits.

python -m benchmarks.recipfl.digits [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks.recipfl.run import NO_TRANSFER, PUBLISHED
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
METHODS = {
    "all-small": [
        *("strategy=fedavg", "family=lenet5", "family-arguments=conv_channels = [6, 3], hidden = [84]", "widths=1"),
    ],
    "exclusive": ["strategy=fedavg", "fedavg.use=affordable"],
    "exclusive-both": ["strategy=fedavg", "fedavg.use=affordable", "both-models=true"],
    # The narrow cut has 2,812 parameters, the small model of the others 2,587.
    # As many devices take batch norm statistics as a round has, over all that they hold, which was the default when
    # this ran.
    "heterofl": [
        *("strategy=heterofl", "statistics.devices=6", "statistics.examples=0", "family=lenet5", "family-arguments="),
        *("widths=1, 0.33", "both-models=true"),
    ],
    "recipfl": PUBLISHED,
    "recipfl-no-transfer": NO_TRANSFER,
}

STUDY = Study(
    HERE / "digits.toml",
    {method: [f"fleet={HERE / 'digits-fleet.toml'}", *sets] for method, sets in METHODS.items()},
    general=False,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
