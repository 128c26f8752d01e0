"""Seeds from their shares, some of which may be wrong, and who must have lied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from wildflower.messages.masks import hash_of_share, joined_seed


class Shares:
    """The shares that the members of a sum have revealed, from which the seeds of all are recovered.

    A member tells the hash of every share that it seals. A share with another hash is passed over: it is the fault of
    one of two, of the member whose seed it is or of the one that revealed it. Who has more such faults than there may
    be liars has lied, because else everybody on the other side has. If shares with the right hashes give a wrong seed,
    the member whose seed it is has lied.

    Args:
        revealed: by device, its share of each of the seeds; "" of a share that it could not read.
        places: of all members in the splitting of seeds.
        threshold: how many shares give a seed.
    """

    def __init__(self, revealed: Mapping[int, Sequence[str]], places: Mapping[int, int], threshold: int) -> None:
        self.revealed, self.places, self.threshold = revealed, places, threshold
        self._tolerated = max(1, (len(places) - 1) // 3)  # liars, of whom the protocol bears less than a third
        self._faults: set[tuple[int, int]] = set()  # whose seed, who revealed
        self._proven: dict[int, str] = {}

    def seed(self, number: int, owner: int, hashes: Sequence[str], is_right: Callable[[bytes], bool]) -> bytes | None:
        """One seed; None where it cannot be recovered.

        Args:
            number: of the seed among those that everybody has revealed shares of.
            owner: whose seed it is.
            hashes: of all its shares, in the order of their places.
        """
        right: dict[int, bytes] = {}
        for device, shares in sorted(self.revealed.items()):
            share, place = bytes.fromhex(shares[number]), self.places[device]
            if hash_of_share(share) == hashes[place]:
                right[place] = share
            else:
                self._faults.add((owner, device))
        if len(right) < self.threshold:
            return None
        seed = joined_seed(dict(list(right.items())[: self.threshold]))
        if is_right(seed):
            return seed
        self._proven[owner] = "the shares that it sealed are of another seed than it said"
        return None

    def liars(self) -> dict[int, str]:
        """Return who must have lied, and why, if less than a third of all have, or one."""
        owners, revealers = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        for owner, revealer in self._faults:
            owners[owner].add(revealer)
            revealers[revealer].add(owner)
        found = dict(self._proven)
        for device, others in sorted(owners.items()):
            if len(others) > self._tolerated or device in others:
                found.setdefault(device, f"shares of its own seeds are wrong that {len(others)} others revealed")
        # Who has sealed wrong shares says nothing of those who reveal them.
        sealed_wrong = set(found)
        for device, others in sorted(revealers.items()):
            if len(others - sealed_wrong) > self._tolerated:
                found.setdefault(device, f"the shares that it revealed of {len(others)} seeds are wrong")
        return found
