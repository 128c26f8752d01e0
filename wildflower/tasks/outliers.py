"""Values and devices so far from all others that, once normalized, the others are alike and nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from wildflower.tasks.device_data import Moments

MOST_DEVIATIONS = 100.0  # of the middle half's width: beyond, float32 and a norm have little left to tell values apart
MOST_VALUES = 1_000_000  # of a channel that are looked at
FAR_OFF = 1000.0  # times the distance of the median device: no other unit (mV for V) lies further off by mistake alone
ALIKE = (
    "half of whose values lie within a hundredth of the deviation, so that they are nearly alike once normalized: look "
    "for wrong values, or a code for missing ones"
)


def crowded(inputs: Tensor) -> list[int]:
    """Return the channels of which a few values are so far off that the middle half is one point beside the deviation.

    inputs (examples, channels, ...), floats. Channels whose middle half has one value only are none of them: zeros
    with a few other values are usual.
    """
    found = []
    for channel, values in enumerate(inputs.unbind(1)):
        flat = values.numpy().ravel()
        if not flat.size:
            continue
        low, high = np.quantile(flat[:: math.ceil(flat.size / MOST_VALUES)].astype(np.float64), (0.25, 0.75))
        if high > low and float(values.double().std(correction=0)) > MOST_DEVIATIONS * (high - low):
            found.append(channel)
    return found


def far_off(moments: Mapping[int, Moments]) -> dict[int, str]:
    """Return the devices whose inputs are no longer of the same kind as most devices', and why.

    Of each channel: how far a device's values lie from the median of all devices' means, as a root mean square. A
    device is far off where that is more than a thousand times what it is on the median device. So it takes a majority
    to rule a device out, and among two devices none is. Where most have one value, nobody is.
    """
    found: dict[int, str] = {}
    if not moments:
        return found
    for channel in range(len(next(iter(moments.values())).sums)):
        means = {device: said.sums[channel] / said.values for device, said in moments.items()}
        centers = {device: said.centers[channel] if said.centers else 0.0 for device, said in moments.items()}
        middle = _median([centers[device] + mean for device, mean in means.items()])
        distances = {
            device: math.hypot(
                math.sqrt(max(0.0, said.squares[channel] / said.values - means[device] ** 2)),
                centers[device] + means[device] - middle,
            )
            for device, said in moments.items()
        }
        usual = _median(list(distances.values()))
        for device, distance in distances.items():
            if distance > FAR_OFF * usual > 0:
                found.setdefault(
                    device,
                    f"channel {channel} of its inputs, counted from 0, lies {distance:.3g} from the middle, and "
                    f"{usual:.3g} on most devices: normalized with it, all others' would be alike; correct its values, "
                    "or declare mean and std in task-arguments",
                )
    return found


def _median(values: Sequence[float]) -> float:
    """Return the median; of an even number the larger of the two in the middle."""
    return sorted(values)[len(values) // 2]
