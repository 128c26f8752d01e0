"""The speed of a device's training: measured by a short training, kept in its state folder, and looked after.

A round's training time is predicted as its floating point operations over this figure. It is that of convolutions of
middling width; layers of few channels, and other layers, reach less of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from wildflower.devices import node_config
from wildflower.devices.checked import MAX_FLOP_PER_S, STRICT, AtLeast0, FlopPerS, Text, load, save
from wildflower.devices.resource_report import DeviceReport
from wildflower.plugins.flower_log import log

if TYPE_CHECKING:
    import torch


FILE = "speed.json"
OLDEST_SECONDS = 30 * 24 * 3600.0  # after which it is measured again: systems and libraries are updated
WARM_UP_SECONDS, MEASURED_SECONDS = 0.05, 0.25  # of a container with a CPU quota this is more than two of its periods
LOOK_SECONDS = 0.1  # of a shorter measurement, which says whether another is worth its time
CHANGE = 1 / 3  # of the speed, after which it is another: a board that has grown hot, or has other work
BATCH, CHANNELS, SIDE, KERNEL = 16, 32, 16, 3  # of the convolution; its tensors have half a megabyte each


@dataclass(config=STRICT, frozen=True)
class Speed:
    """A measurement: the speed, when (seconds since 1970), and on which machine."""

    flop_per_s: FlopPerS
    measured_at: AtLeast0
    machine: Text


def with_speed(report: DeviceReport, config: Mapping[str, object], folder: Path) -> DeviceReport:
    """Return the report with the speed of training: as the owner wrote it down, or as measured here.

    In a process that has PyTorch loaded, and so works, a kept speed is compared with a short measurement.

    Args:
        report: of this machine.
        config: the node config. `flop-per-s` is what the owner wrote down; with `gpu-trainer` nothing is measured, as
            training happens elsewhere.
        folder: the device's state folder.

    Raises:
        ValueError: names the key of the node config that says what it must not.
    """
    owner = node_config.read(config)
    if owner.flop_per_s is not None:
        return replace(report, flop_per_s=owner.flop_per_s)
    if owner.gpu_trainer is not None:
        return report
    now, machine = time.time(), f"{report.kind}, {report.cpus:g} CPUs, {report.accelerator or 'no accelerator'}"
    speed = load(Speed, folder / FILE)
    # A time that lies in the future is of a clock that was set back since, as on boards without one of their own.
    holds = speed is not None and speed.machine == machine and 0 <= now - speed.measured_at <= OLDEST_SECONDS
    try:
        if speed is None or not holds:
            speed = _kept(measure(), now, machine, folder)
        elif _can_look() and _differs(measure(LOOK_SECONDS), speed) and _differs(measured := measure(), speed):
            speed = _kept(measured, now, machine, folder)
    except (MemoryError, RuntimeError) as error:  # as a rule for want of memory: the report is worth more
        log.warning("The speed of training could not be measured now: %s", error)
        if speed is None or not holds:
            return report
    return replace(report, flop_per_s=speed.flop_per_s, speed_age_seconds=max(0.0, now - speed.measured_at))


def _kept(flop_per_s: float, now: float, machine: str, folder: Path) -> Speed:
    speed = Speed(min(flop_per_s, MAX_FLOP_PER_S), now, machine)
    with suppress(OSError):  # a full disk must not cost the device its work; the next report measures again
        save(speed, folder / FILE)
    return speed


def _can_look() -> bool:
    """Whether a short measurement loads neither PyTorch nor CUDA, which would take far longer than it."""
    if "torch" not in sys.modules:
        return False
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_initialized()


def _differs(flop_per_s: float, speed: Speed) -> bool:
    return abs(flop_per_s - speed.flop_per_s) > CHANGE * speed.flop_per_s


def measure(seconds: float = MEASURED_SECONDS) -> float:
    """Return the operations per second of training, on the GPU where PyTorch has one."""
    import torch  # not small, and `wildflower --help` does without it

    on_gpu = torch.cuda.is_available()
    layer = torch.nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=KERNEL // 2, device="cuda" if on_gpu else "cpu")
    inputs = torch.ones(BATCH, CHANNELS, SIDE, SIDE, device=layer.weight.device, requires_grad=True)
    # A multiplication and an addition for every weight and position, once forward and twice backward.
    flops = 3 * 2 * BATCH * SIDE**2 * CHANNELS**2 * KERNEL**2
    steps = 0
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        _step(layer, inputs)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or not steps:
        _step(layer, inputs)
        steps += 1
    return steps * flops / (time.perf_counter() - start)


def _step(layer: torch.nn.Module, inputs: torch.Tensor) -> None:
    import torch

    torch.autograd.backward(layer(inputs).sum())
    inputs.grad = None
    layer.zero_grad()
    if inputs.is_cuda:
        torch.cuda.synchronize()
