"""Which device holds which training examples.

`divide` deals out every example once, as flwr-datasets' partitioners do, and keeps the result as an index file, so that
machines whose arithmetic differs in the last bit can share it. `strong_and_weak` deals out training and test
examples at once. `draw` computes the examples of one device alone, from (seed, device): any number of devices costs
nothing until they are asked for.

flwr-datasets deals out data sets of `datasets`, which it needs with pandas and pyarrow. A device that only wants its
numbers of examples has none of them, and these are a few lines of NumPy.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass

import numpy as np

from wildflower.tasks.data import cache_folder, digest, written_whole

INDEX_VERSION = 1
"""Raised whenever partitions change, so that index files of an older release are not read."""

MAX_REQUIRED_EXAMPLES = 10
"""A Dirichlet partition is drawn again until every device has this many examples (flwr-datasets' own default) ..."""

MIN_SHARE = 4
"""... or a quarter of an equal share where that is less."""

ATTEMPTS = 11
"""Draws of a Dirichlet partition, as many as flwr-datasets makes."""

TURN = 5
"""Training examples that a weak device takes before the next one does."""


@dataclass(frozen=True)
class Index:
    """Examples of every device: device d holds `examples[starts[d] : starts[d + 1]]`."""

    examples: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, device: int) -> np.ndarray:
        return self.examples[self.starts[device] : self.starts[device + 1]]


def divide(
    partition: str,
    *,
    labels: np.ndarray,
    natural_ids: np.ndarray | None,
    alpha: float,
    devices: int,
    seed: int,
    in_order: bool = False,
) -> Index:
    """Deal out all examples, each to one device.

    `iid`: equal shares of a shuffled order. `dirichlet`: shares of every class drawn from Dir(`alpha`) over devices; a
    device that has more than an equal share gets none of the classes after (Yurochkin et al. 2019, arXiv:1905.12022,
    as its authors' code balances). `natural`: one device per natural id, and `devices` of them chosen by `seed`, or
    with `in_order` the first ones.

    ValueError: more devices than examples or natural ids, no natural ids, an alpha that leaves devices almost empty.
    """
    if partition == "natural":
        if natural_ids is None:
            raise ValueError(
                "partition 'natural' needs a task that records where each example is from, such as femnist, or npz "
                "with the array groups in train.npz; use 'iid' or 'dirichlet'"
            )
        sources = int(natural_ids.max()) + 1
        if devices > sources:
            raise ValueError(f"{devices} devices are more than the {sources} natural ids of the task")
        # Every source is dealt once; which of them take part is chosen afterwards, so one index file serves all.
        index = _kept_index(_digest(partition, natural_ids), partition, natural_ids, alpha, sources, seed)
        if in_order:  # of the ids, which need not be the index's
            chosen = np.argsort([natural_ids[index[number][0]] for number in range(sources)])
        else:
            chosen = np.random.default_rng([seed, devices]).permutation(sources)
        return _choose(index, chosen[:devices])
    if devices > len(labels):
        raise ValueError(
            f"{devices} devices are more than the {len(labels)} training examples; "
            "use fewer devices, or set examples-per-device and let devices share examples"
        )
    settings = {"devices": devices, "seed": seed} | ({"alpha": float(alpha)} if partition == "dirichlet" else {})
    return _kept_index(_digest(partition, labels, **settings), partition, labels, alpha, devices, seed)


def strong_and_weak(
    labels: np.ndarray, test_labels: np.ndarray, *, strong: int, share: float, alpha: float, devices: int, seed: int
) -> tuple[Index, Index]:
    """Deal out the training and the test examples as RecipFL's experiments do: (training, test).

    Devices 0 to `strong` - 1 share `share` of every class equally; the rest goes to the weak ones, as many examples to
    each, by a mix of classes that each draws from Dir(`alpha`); where a class is used up, others take its place. They
    take TURN examples in turn, so that all are left alike with what nobody wanted. Every device tests on equally many
    of the test examples, in the mix of its training examples.

    ValueError: not at least one strong and one weak device with an example for each.
    """
    weak = devices - strong
    if strong < 1 or weak < 1:
        raise ValueError(f"{strong} strong of {devices} devices: at least one must be strong, and one weak")
    rng = np.random.default_rng([seed, devices, strong, 2])
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
    mixes = rng.dirichlet(np.full(classes, alpha), size=weak)
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
    return _indexed(parts), _indexed(tests)


def _take(rng: np.random.Generator, pools: list[np.ndarray], mix: np.ndarray, examples: int) -> np.ndarray:
    """Examples out of the classes' pools by a mix, as near as whole numbers come; they leave the pools."""
    available = np.array([len(pool) for pool in pools])
    counts = np.minimum((mix * examples).astype(int), available)
    counts += _counts_by_mix(rng, mix, available - counts, examples - int(counts.sum()))
    taken = np.concatenate([pool[:count] for pool, count in zip(pools, counts, strict=True)])
    pools[:] = [pool[count:] for pool, count in zip(pools, counts, strict=True)]
    return taken


def _indexed(parts: list[np.ndarray]) -> Index:
    return Index(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))


def draw(members: list[np.ndarray], *, alpha: float | None, device: int, seed: int, examples: int) -> np.ndarray:
    """The `examples` training examples of one device; devices draw independently and may share examples.

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


def _choose(index: Index, devices: np.ndarray) -> Index:
    return _indexed([index[device] for device in devices.tolist()])


def _digest(partition: str, column: np.ndarray, **settings: float) -> str:
    hashed = hashlib.sha256(np.ascontiguousarray(column, dtype="<i8").tobytes()).hexdigest()
    return digest(index=INDEX_VERSION, partition=partition, column=hashed, **settings)


def _kept_index(key: str, partition: str, column: np.ndarray, alpha: float, devices: int, seed: int) -> Index:
    """The index file of `key`, made if there is none."""
    file = cache_folder("partitions") / f"{partition}-{key}.npz"
    if not file.exists():
        index = _compute(partition, column, alpha, devices, seed)
        with written_whole(file) as beside:
            np.savez(beside, examples=index.examples, starts=index.starts)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            index = Index(arrays["examples"], arrays["starts"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"the index file {file} cannot be read ({error}); delete it and it is made anew") from error
    if not _deals_all(index, len(column), devices):
        raise ValueError(f"{file}: does not deal {len(column)} examples to {devices} devices; delete it")
    return index


def _deals_all(index: Index, examples: int, devices: int) -> bool:
    """Whether every example is dealt once and every device has some."""
    sizes = np.diff(index.starts)
    once = np.array_equal(np.sort(index.examples), np.arange(examples))
    return once and len(index) == devices and index.starts[0] == 0 and sizes.sum() == examples and sizes.min() > 0


def _compute(partition: str, column: np.ndarray, alpha: float, devices: int, seed: int) -> Index:
    """Deal out all examples by their labels or natural ids, as flwr-datasets' partitioners do, to the last bit."""
    if partition == "iid":
        order = np.random.default_rng([seed, devices]).permutation(len(column))
        return _indexed(np.array_split(order, devices))
    if partition == "natural":
        sizes = np.unique(column, return_counts=True)[1]
        return Index(np.argsort(column, kind="stable"), np.cumsum([0, *sizes]))
    return _indexed(_dirichlet(column, alpha, devices, np.random.default_rng(seed)))


def _dirichlet(labels: np.ndarray, alpha: float, devices: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The examples of every device; ValueError where some device is left almost empty in each of ATTEMPTS draws."""
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
            return dealt
    raise ValueError(
        f"no dirichlet partition of {len(labels)} examples over {devices} devices with alpha = {alpha} was found "
        f'that leaves every device at least {minimum}: take partition = "iid", raise alpha, use fewer devices, or '
        "set examples-per-device and let devices share examples"
    )
