"""Oddities of data, told before round 1: tests on training examples or on another scale, and inputs all the same."""

from __future__ import annotations

from torch import Tensor

from wildflower.tasks.data import Data
from wildflower.tasks.remarks import Remark, Remarks

KNOWN = 0.05  # of the test examples, above which it is told that training examples are among them
UNLIKE = 4.0  # times the deviation: a test set of a few classes alone lies within that
FEWEST = 20  # examples of which a mean and a deviation say something
MOST = 10_000  # examples that are looked at for these


def seldom_meant(train: Data, test: Data) -> tuple[Remark, ...]:
    """Return what is odd in the inputs (examples, ...) to train on and to test on."""
    remarks = Remarks()
    seen = {hash(row.tobytes()) for row in train.inputs.numpy()}
    if len(train) > 1 and len(seen) == 1:
        remarks.add("training examples whose inputs are all the same, so that nothing can be learned", "", len(train))
    known = [number for number, row in enumerate(test.inputs.numpy()) if hash(row.tobytes()) in seen]
    if len(known) > KNOWN * len(test):
        remarks.add(
            f"test examples of {len(test)} whose inputs are training examples, so that scores may be too high",
            f"test example {known[0]}",
            len(known),
        )
    numbers = train.inputs.is_floating_point() or train.inputs.dim() == 4  # and neither letters nor tokens
    if numbers and _unlike(train.inputs, test.inputs):
        remarks.add(
            "test examples whose inputs have another scale than the training examples': prepare both in the same way",
            "",
            len(test),
        )
    return remarks.found()


def _unlike(train: Tensor, test: Tensor) -> bool:
    """Return whether, in the middle of all channels, the inputs (examples, channels, ...) are of two scales."""
    if min(len(train), len(test)) < FEWEST:
        return False
    channels = range(2, train.dim())
    (wide, middle), (other, center) = (
        (part.std(dim=(0, *channels)), part.mean(dim=(0, *channels)))
        for part in (some[:: len(some) // MOST + 1].double() for some in (train, test))
    )
    varied = wide > 0
    if not bool(varied.any()):
        return False
    ratios = (other / wide)[varied].median()
    shift = ((center - middle).abs() / wide)[varied].median()
    return not 1 / UNLIKE <= float(ratios) <= UNLIKE or float(shift) > UNLIKE
