"""Partitions: which device trains and tests on which examples. Each has a class here, in `PARTITIONS` by its name.

Examples that are dealt out once are kept in an index file. With `examples_per_device` the examples of a device are
computed from (seed, device) alone: any number of devices costs nothing until they are asked for.

flwr-datasets deals out data sets of `datasets`, which it needs with pandas and pyarrow. A device that only wants its
numbers of examples has none of them, and these are a few lines of NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from typing_extensions import override

from wildflower.tasks.data import DataSet
from wildflower.tasks.index import Index, kept_index

MAX_REQUIRED_EXAMPLES = 10
"""A Dirichlet partition is drawn again until every device has this many examples (flwr-datasets' own default) ..."""

MIN_SHARE = 4
"""... or a quarter of an equal share where that is less."""

ATTEMPTS = 11
"""Draws of a Dirichlet partition, as many as flwr-datasets makes."""

TURN = 5
"""Training examples that a weak device takes before the next one does."""


class PartitionSettings(BaseModel):
    """The settings of a partition.

    Attributes:
        devices: their number.
        alpha: of the Dirichlet distributions that mixes of classes are drawn from.
        seed: what all chance follows from.
        test_fraction: the part of each device's examples that it keeps for testing.
        examples_per_device: None deals out every example once; a number lets each device draw that many for itself, so
            that devices may share examples and be as many as one likes.
        strong_devices, strong_share: under "strong-and-weak" the first so many devices hold that part of the training
            examples, and devices test on parts of the test set.
        strong_test: what a strong device tests on, its "share" like all others, or the "whole" test set, whose mix of
            classes is its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    partition: Literal["iid", "dirichlet", "natural", "strong-and-weak", "own"] = "iid"
    devices: int = Field(ge=1)
    alpha: float = Field(0.5, gt=0)
    seed: int = Field(0, ge=0)
    test_fraction: float = Field(0.0, ge=0, lt=1)
    examples_per_device: Annotated[int, Field(ge=1)] | None = None
    strong_devices: int = Field(0, ge=0)
    strong_share: float = Field(0.5, gt=0, lt=1)
    strong_test: Literal["share", "whole"] = "share"

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        PARTITIONS[self.partition].check(self)
        return self


@dataclass(frozen=True)
class Shard:
    """One device's examples: indices into the task's training data, int64; no index is in both.

    Where devices test on parts of the test set, `test` is empty; `wildflower.tasks.task.Task.own_test` knows both
    cases.
    """

    train: Tensor
    test: Tensor


class Partition:
    """A partition: which device trains and tests on which examples of a data set.

    Args:
        settings: of the partition.
        data: all examples, or under "own" those of one device.
        in_time: the examples of each source lie in order of time.
    """

    _index: Index
    by_class: ClassVar[bool] = False  # needs the class of every example
    draws: ClassVar[bool] = False  # devices may draw `examples_per_device`

    def __init__(self, settings: PartitionSettings, data: DataSet, *, in_time: bool) -> None:
        self.settings, self.data, self.in_time = settings, data, in_time

    @classmethod
    def check(cls, settings: PartitionSettings) -> None:
        """Raise ValueError where settings do not go with this partition."""
        if settings.examples_per_device is not None and not cls.draws:
            raise ValueError(
                f"examples_per_device does not go with partition {settings.partition!r}, which says who holds what"
            )

    def count(self, device: int) -> int:
        """Return how many training examples a device has, with those that it keeps for testing."""
        return len(self._index[device])

    def examples(self, device: int) -> np.ndarray:
        """Return the numbers of a device's training examples, with those that it keeps for testing."""
        return self._index[device]

    def tests(self, device: int) -> Tensor | slice | None:
        """Return which examples of the test set a device tests on; None where it tests on those that it keeps."""
        return None

    def training_examples(self, device: int) -> int:
        """Return how many of its examples a device trains on: one at least."""
        examples = self.count(device)
        return examples - min(round(self.settings.test_fraction * examples), examples - 1)

    def shard(self, device: int) -> Shard:
        """Return the examples of a device, the same on every machine."""
        rng = np.random.default_rng([self.settings.seed, device, 1])
        shuffled = torch.from_numpy(rng.permutation(self.examples(device)))
        for_test = len(shuffled) - self.training_examples(device)
        return Shard(train=shuffled[for_test:], test=shuffled[:for_test])


class _DealtOrDrawn(Partition, ABC):
    """A partition that deals out every example, or lets every device draw `examples_per_device`."""

    draws = True

    def __init__(self, settings: PartitionSettings, data: DataSet, *, in_time: bool) -> None:
        super().__init__(settings, data, in_time=in_time)
        drawn, examples = settings.examples_per_device, len(data.train)
        if drawn is not None and drawn > examples:
            raise ValueError(f"examples-per-device = {drawn} is more than the {examples} training examples")
        if drawn is None and settings.devices > examples:
            raise ValueError(
                f"{settings.devices} devices are more than the {examples} training examples; "
                "use fewer devices, or set examples-per-device and let devices share examples"
            )
        if drawn is None:
            # The index file of any partition goes by the classes, where there are any.
            by_class = data.train.label_kind == "classes"
            column = data.train.labels.numpy() if by_class else np.zeros(examples, dtype=np.int64)
            kept = {"devices": settings.devices, "seed": settings.seed}
            alpha = {"alpha": float(settings.alpha)} if self.by_class else {}
            self._index = kept_index(settings.partition, column, settings.devices, self.dealt, **kept, **alpha)

    @abstractmethod
    def dealt(self) -> Index:
        """Deal out all examples."""

    @abstractmethod
    def drawn(self, device: int, examples: int) -> np.ndarray:
        """Draw so many examples for one device."""

    @override
    def count(self, device: int) -> int:
        return self.settings.examples_per_device or super().count(device)

    @override
    def examples(self, device: int) -> np.ndarray:
        drawn = self.settings.examples_per_device
        return super().examples(device) if drawn is None else self.drawn(device, drawn)


class Iid(_DealtOrDrawn):
    """Equal shares of a shuffled order."""

    @override
    def dealt(self) -> Index:
        return iid(len(self.data.train), self.settings.devices, self.settings.seed)

    @override
    def drawn(self, device: int, examples: int) -> np.ndarray:
        everything = [np.arange(len(self.data.train))]
        return draw(everything, alpha=None, device=device, seed=self.settings.seed, examples=examples)


class Dirichlet(_DealtOrDrawn):
    """Shares of every class drawn from Dir(`alpha`) over devices."""

    by_class = True

    @override
    def dealt(self) -> Index:
        settings = self.settings
        return dirichlet(self.data.train.labels.numpy(), settings.alpha, settings.devices, settings.seed)

    @override
    def drawn(self, device: int, examples: int) -> np.ndarray:
        settings = self.settings
        return draw(self._classes, alpha=settings.alpha, device=device, seed=settings.seed, examples=examples)

    @cached_property
    def _classes(self) -> list[np.ndarray]:
        labels = self.data.train.labels.numpy()
        return [np.flatnonzero(labels == label) for label in range(self.data.classes)]


class Natural(Partition):
    """One device for each real-world source; which sources take part follows from the seed.

    Where every source has classes of its own, the first sources take part: who has which classes is part of an
    experiment, such as the strongest device the most.
    """

    def __init__(self, settings: PartitionSettings, data: DataSet, *, in_time: bool) -> None:
        super().__init__(settings, data, in_time=in_time)
        if data.natural_ids is None:
            raise ValueError(
                "partition 'natural' needs a task that records where each example is from, such as femnist, or npz "
                "with the array groups in train.npz; use 'iid' or 'dirichlet'"
            )
        ids = data.natural_ids.numpy()
        sources = int(ids.max()) + 1
        if settings.devices > sources:
            raise ValueError(f"{settings.devices} devices are more than the {sources} natural ids of the task")
        # Every source is dealt once; which of them take part is chosen afterwards, so one index file serves all.
        index = kept_index("natural", ids, sources, lambda: natural(ids))
        if data.in_order or data.label_sets is not None:  # in order of the ids, which need not be the index's
            chosen = np.argsort([ids[index[number][0]] for number in range(sources)])
        else:
            chosen = np.random.default_rng([settings.seed, settings.devices]).permutation(sources)
        self._index = Index.of([index[source] for source in chosen[: settings.devices].tolist()])

    @override
    def shard(self, device: int) -> Shard:
        if not self.in_time:
            return super().shard(device)
        # Nothing that is tested occurs in what comes before.
        ordered, training = torch.from_numpy(np.sort(self.examples(device))), self.training_examples(device)
        return Shard(train=ordered[:training], test=ordered[training:])


class StrongAndWeak(Partition):
    """Few devices with much of every class, and many with little; both test on parts of the test set (RecipFL)."""

    by_class = True

    def __init__(self, settings: PartitionSettings, data: DataSet, *, in_time: bool) -> None:
        super().__init__(settings, data, in_time=in_time)
        labels, test_labels = data.train.labels.numpy(), data.test.labels.numpy()
        self._index, self._test_index = strong_and_weak(labels, test_labels, settings)

    @override
    @classmethod
    def check(cls, settings: PartitionSettings) -> None:
        if not 0 < settings.strong_devices < settings.devices:
            raise ValueError(
                f"partition 'strong-and-weak' needs strong_devices from 1 to {settings.devices - 1}, "
                f"got {settings.strong_devices}"
            )
        if settings.test_fraction or settings.examples_per_device is not None:
            raise ValueError(
                "partition 'strong-and-weak' deals out the test set too: "
                "test_fraction and examples_per_device do not go with it"
            )

    @override
    def tests(self, device: int) -> Tensor | slice | None:
        if self.settings.strong_test == "whole" and device < self.settings.strong_devices:
            return slice(None)
        return torch.from_numpy(self._test_index[device])


class Own(Partition):
    """Every device has what lies in its own folder, for testing too if it has anything to test on."""

    @override
    def count(self, device: int) -> int:
        return len(self.data.train)

    @override
    def examples(self, device: int) -> np.ndarray:
        return np.arange(len(self.data.train))

    @override
    def tests(self, device: int) -> Tensor | slice | None:
        return slice(None) if len(self.data.test) else None

    @override
    def training_examples(self, device: int) -> int:
        return self.count(device) if len(self.data.test) else super().training_examples(device)

    @override
    def shard(self, device: int) -> Shard:
        if not len(self.data.test):
            return super().shard(device)
        return Shard(train=torch.arange(len(self.data.train)), test=torch.arange(0))


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "natural": Natural,
    "strong-and-weak": StrongAndWeak,
    "own": Own,
}


# How they are computed ------------------------------------------------------------------------------------------------


def iid(examples: int, devices: int, seed: int) -> Index:
    """Deal out equal shares of a shuffled order."""
    return Index.of(np.array_split(np.random.default_rng([seed, devices]).permutation(examples), devices))


def natural(natural_ids: np.ndarray) -> Index:
    """Deal out the examples of each source to a device, in the order of the sources' numbers."""
    sizes = np.unique(natural_ids, return_counts=True)[1]
    return Index(np.argsort(natural_ids, kind="stable"), np.cumsum([0, *sizes]))


def dirichlet(labels: np.ndarray, alpha: float, devices: int, seed: int) -> Index:
    """Deal out shares of every class drawn from Dir(`alpha`) over devices, as flwr-datasets does, to the last bit.

    A device that has more than an equal share gets none of the classes after (Yurochkin et al. 2019, arXiv:1905.12022,
    as its authors' code balances). ValueError where some device is left almost empty in each of ATTEMPTS draws.
    """
    rng = np.random.default_rng(seed)
    minimum = max(1, min(MAX_REQUIRED_EXAMPLES, len(labels) // (MIN_SHARE * devices)))
    classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(ATTEMPTS):
        parts: list[list[np.ndarray]] = [[] for _ in range(devices)]
        sizes = np.zeros(devices, dtype=int)
        for examples in classes:
            mix = rng.dirichlet(np.full(devices, alpha))
            mix[sizes > len(labels) / devices] = 0.0
            left = np.cumsum(mix)[-1]  # one by one: `sum` rounds otherwise, and would give other partitions
            # Where the draw has only devices that are full, the last device takes the class.
            shares = np.cumsum(mix / left) if left else np.zeros(devices)
            cuts = (shares * len(examples)).astype(int)[:-1]
            for device, part in enumerate(np.split(examples, cuts)):
                parts[device].append(part)
                sizes[device] += len(part)
        if sizes.min() >= minimum:
            dealt = [np.concatenate(part) for part in parts]
            for part in dealt:
                rng.shuffle(part)
            return Index.of(dealt)
    raise ValueError(
        f"no dirichlet partition of {len(labels)} examples over {devices} devices with alpha = {alpha} was found "
        f'that leaves every device at least {minimum}: take partition = "iid", raise alpha, use fewer devices, or '
        "set examples-per-device and let devices share examples"
    )


def strong_and_weak(labels: np.ndarray, test_labels: np.ndarray, settings: PartitionSettings) -> tuple[Index, Index]:
    """Deal out the training and the test examples as RecipFL's experiments do: (training, test).

    The strong devices, the first ones, share `strong_share` of every class equally. The rest goes to the weak ones, as
    many examples to each, by a mix of classes that each draws from Dir(`alpha`); where a class is used up, others take
    its place. They take TURN examples in turn, so that all are left alike with what nobody wanted. Every device tests
    on equally many of the test examples, in the mix of its training examples.

    ValueError where there is not an example for each.
    """
    devices, strong, share = settings.devices, settings.strong_devices, settings.strong_share
    weak = devices - strong
    rng = np.random.default_rng([settings.seed, devices, strong, 2])
    classes = int(max(labels.max(), test_labels.max())) + 1
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    cuts = [round(share * len(pool)) for pool in pools]
    for_strong = np.concatenate([pool[:cut] for pool, cut in zip(pools, cuts, strict=True)])
    pools = [pool[cut:] for pool, cut in zip(pools, cuts, strict=True)]
    rest = sum(map(len, pools))
    if len(for_strong) < strong or rest < weak or len(test_labels) < devices:
        raise ValueError(
            f"a share of {share} of {len(labels)} training examples for {strong} strong devices, the rest for {weak} "
            f"weak ones, with {len(test_labels)} to test on, leaves a device without any: use fewer devices"
        )
    parts = [for_strong[device::strong] for device in range(strong)]  # of all classes alike, since they lie in order
    mixes = rng.dirichlet(np.full(classes, settings.alpha), size=weak)
    turns: list[list[np.ndarray]] = [[] for _ in range(weak)]
    for start in range(0, rest // weak + 1, TURN):
        for device in rng.permutation(weak).tolist():
            wanted = rest // weak + (device < rest % weak) - start
            turns[device].append(_take(rng, pools, mixes[device], min(max(wanted, 0), TURN)))
    parts += [np.concatenate(taken) for taken in turns]
    test_pools = [rng.permutation(np.flatnonzero(test_labels == label)) for label in range(classes)]
    size, more = divmod(len(test_labels), devices)
    tests = [
        _take(rng, test_pools, np.bincount(labels[part], minlength=classes) / len(part), size + (device < more))
        for device, part in enumerate(parts)
    ]
    return Index.of(parts), Index.of(tests)


def _take(rng: np.random.Generator, pools: list[np.ndarray], mix: np.ndarray, examples: int) -> np.ndarray:
    """Take examples out of the classes' pools by a mix, as near as whole numbers come; they leave the pools."""
    available = np.array([len(pool) for pool in pools])
    counts = np.minimum((mix * examples).astype(int), available)
    counts += _counts_by_mix(rng, mix, available - counts, examples - int(counts.sum()))
    taken = np.concatenate([pool[:count] for pool, count in zip(pools, counts, strict=True)])
    pools[:] = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
    return taken


def draw(members: list[np.ndarray], *, alpha: float | None, device: int, seed: int, examples: int) -> np.ndarray:
    """Draw the `examples` training examples of one device; devices draw independently and may share examples.

    `members` are the training examples in groups: all in one group for iid, one group per class for dirichlet. The
    device's mix of groups is drawn from Dir(`alpha`) unless that is None, its number of examples per group from that
    mix, then the examples; a group that has fewer gives all it has, and the rest comes from the others by the mix.
    """
    rng = np.random.default_rng([seed, device, 0])
    available = np.array([len(group) for group in members])
    mix = available / available.sum() if alpha is None else rng.dirichlet(np.full(len(members), alpha))
    counts = _counts_by_mix(rng, mix, available, examples)
    return np.concatenate(
        [rng.choice(group, count, replace=False) for group, count in zip(members, counts, strict=True)]
    )


def _counts_by_mix(rng: np.random.Generator, mix: np.ndarray, available: np.ndarray, examples: int) -> np.ndarray:
    counts = np.zeros_like(available)
    while (missing := examples - counts.sum()) > 0:
        open_mix = np.where(counts < available, mix, 0.0)
        if open_mix.sum() == 0:  # the mix has only classes that are used up
            open_mix = (available - counts).astype(float)
        counts = np.minimum(counts + rng.multinomial(missing, open_mix / open_mix.sum()), available)
    return counts
