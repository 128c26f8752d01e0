"""What a strong device's small model gains from its large one, where a seventh of all uploads are such students.

python -m benchmarks.recipfl.transfer [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks.recipfl.run import ABLATED, NO_TRANSFER, PUBLISHED, REVERSED
from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
SMALL = "family-arguments=conv_channels = [3, 2], hidden = [84]"
METHODS = {
    # What there is to teach: the large model on all devices, whatever their links, and the small one on all.
    "all-large": ["strategy=fedavg"],
    "all-small": ["strategy=fedavg", "family=lenet5", SMALL, "widths=1"],
    # A federation of the large model, which has one device, and one of the small model.
    "exclusive": ["strategy=fedavg", "fedavg.use=affordable"],
    "exclusive-both": ["strategy=fedavg", "fedavg.use=affordable", "both-models=true"],
    "recipfl": PUBLISHED,
    "recipfl-weight-0.1": [*ABLATED, "recipfl-controls.feature-weight=0.1"],
    "recipfl-weight-0": [*ABLATED, "recipfl-controls.feature-weight=0"],
    # The last term of Eq. 9 in the direction of the published code.
    "recipfl-divergence": REVERSED,
    # The paper's ablation, as the published code runs it: the strong device trains both models, from labels alone.
    "recipfl-no-transfer": NO_TRANSFER,
}

# With the published code's rate of 0.01 plain averaging is slow, and the teacher is 3 points above its student. With
# this one it is more than 5 above.
RATE = 0.05
RATED = {f"{method}-rate-{RATE}": [*sets, f"learning-rate={RATE}"] for method, sets in METHODS.items()}

STUDY = Study(
    HERE / "transfer.toml",
    {method: [f"fleet={HERE / 'transfer-fleet.toml'}", *sets] for method, sets in (METHODS | RATED).items()},
    general=False,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
