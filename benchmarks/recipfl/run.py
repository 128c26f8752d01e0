"""RecipFL and the methods that it compares with, on Fashion-MNIST; the headline is personal accuracy.

python -m benchmarks.recipfl.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path

from benchmarks.studies import Study, main

HERE = Path(__file__).resolve().parent
SMALL = "family-arguments=conv_channels = [6, 3], hidden = [84]"
# Without FedDyn's correction, which is of one model: strong devices train two. Scored by the deepest exit.
DEPTHFL = ["strategy=depthfl", "family=lenet5", "depthfl.ramp-rounds=100", "both-models=true"]
DEPTHFL += ["depthfl.alpha=0", "depthfl.scored=deepest"]
FEDDYN = [
    "strategy=depthfl",
    "family=lenet5",
    "depthfl.ramp-rounds=100",
    "depthfl.alpha=0.1",
    "depthfl.scored=ensemble",
]
EXITS, NARROW = "family-arguments=exits = [1, 2]", "family-arguments=conv_channels = [4, 16], exits = [1, 2]"
# The hypernetwork of the published code, as nearly all rows were recorded.
PUBLISHED = ["strategy=recipfl", "recipfl.hypernetwork=published"]
# The server learns with a device's first upload how its labels are distributed, and not beforehand as in the paper.
FIRST_UPLOAD = "strategy=recipfl_controls:FirstUpload"
# What strong devices learn from their larger model is changed by a control.
ABLATED = ["strategy=recipfl_controls:Ablated", "recipfl-controls.hypernetwork=published"]
NO_TRANSFER = [*PUBLISHED, "recipfl.transfer=both"]
REVERSED = [*ABLATED, "recipfl-controls.divergence=teacher || student"]
RECIPFL = [FIRST_UPLOAD, "recipfl-controls.hypernetwork=published"]
WHOLE = "recipfl-controls.tile=0"
LARGE_ONLY = "strategy=recipfl_controls:LargeOnly"
METHODS = {
    "all-small": ["strategy=fedavg", "family=lenet5", SMALL, "widths=1"],
    # A federation of the large model and one of the small model.
    "exclusive": ["strategy=fedavg", "fedavg.use=affordable"],
    "exclusive-both": ["strategy=fedavg", "fedavg.use=affordable", "both-models=true"],
    # "clustered": the first convolution is the mean over all devices, the other layers over those with the same model.
    "flexifed": ["strategy=flexifed"],
    # The narrow cut has 5,692 parameters, the small model of the others 5,593.
    "heterofl": ["strategy=heterofl", "family=lenet5", "family-arguments=", "widths=1, 0.33", "both-models=true"],
    "depthfl": [*DEPTHFL, EXITS],
    # DepthFL's weak model has 8,818 parameters and its strong one 53,120, with both heads; here 5,882 and 49,384.
    "depthfl-narrow": [*DEPTHFL, NARROW],
    # As the paper has it: FedDyn's correction, and the mean of the exits is scored. Strong devices train one model; its
    # first exit is that of the weak ones.
    "depthfl-feddyn": [*FEDDYN, EXITS],
    "depthfl-narrow-feddyn": [*FEDDYN, NARROW],
    # With full decoders: tiles of 64 would send LeNet's 120 hidden units the same weights in pairs.
    "recipfl": [*RECIPFL, WHOLE],
    # The hypernetwork that section 3.2 prints, which is the default.
    "recipfl-printed": [FIRST_UPLOAD],
    # The paper's ablation, as the published code runs it: strong devices train both models, from labels alone.
    "recipfl-no-transfer": [*RECIPFL, WHOLE, "recipfl-controls.transfer=both"],
    # The last term of Eq. 9 in the direction of the published code.
    "recipfl-divergence": [*RECIPFL, WHOLE, "recipfl-controls.divergence=teacher || student"],
    "recipfl-large-only": [LARGE_ONLY, "recipfl-controls.hypernetwork=published", WHOLE],
    "recipfl-tiled": [*RECIPFL, "recipfl-controls.tile=64"],
}

STUDY = Study(
    HERE / "table.toml",
    {method: [f"fleet={HERE / 'fleet.toml'}", *sets] for method, sets in METHODS.items()},
    once=("recipfl-large-only",),
    general=False,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
