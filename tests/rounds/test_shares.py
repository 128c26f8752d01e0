"""wildflower/rounds/shares.py: seeds of which some shares are wrong, and who has lied."""

import pytest

from wildflower.messages.masks import hash_of_share, split_seed
from wildflower.rounds.shares import Shares

MEMBERS, THRESHOLD = 10, 7
SEEDS = {owner: bytes([owner]) * 16 for owner in range(MEMBERS)}
WRONG = "ab" * 16


def dealt():
    """Every owner's shares for the others, and their hashes."""
    shares = {owner: split_seed(seed, THRESHOLD, MEMBERS) for owner, seed in SEEDS.items()}
    return shares, {owner: [hash_of_share(share) for share in given] for owner, given in shares.items()}


def recovered(shares, hashes, wrong=(), silent=()):
    """The seeds that are recovered and the liars; `wrong`: (owner, revealer) of shares that are not as vouched for."""
    revealed = {
        device: [WRONG if (owner, device) in wrong else shares[owner][device].hex() for owner in SEEDS]
        for device in range(MEMBERS)
        if device not in silent
    }
    found = Shares(revealed, {device: device for device in range(MEMBERS)}, THRESHOLD)
    seeds = {o: found.seed(o, o, hashes[o], lambda seed, right=SEEDS[o]: seed == right) for o in SEEDS}
    assert all(seed in (None, SEEDS[owner]) for owner, seed in seeds.items())
    return [owner for owner, seed in seeds.items() if seed is None], set(found.liars())


@pytest.mark.parametrize(
    ("wrong", "silent", "lost", "liars"),
    [
        ([], [], [], set()),
        ([], [1, 5, 8], [], set()),
        ([(owner, 4) for owner in SEEDS], [], [], {4}),  # it reveals wrong shares
        ([(owner, 4) for owner in SEEDS], [0, 9], [], {4}),
        ([(4, device) for device in SEEDS], [], [4], {4}),  # it has sealed wrong shares
        ([(4, device) for device in SEEDS if device != 4], [0, 9], [4], {4}),
        ([(owner, device) for owner in SEEDS for device in (2, 4, 6)], [], [], {2, 4, 6}),
        ([(4, 4)], [], [], {4}),  # of nobody but itself
        ([(4, 1), (4, 2), (4, 3)], [], [], set()),  # device 4, or three others
        ([(1, 4), (2, 4), (3, 4)], [], [], set()),
        ([(4, 1), (4, 2), (4, 3)], [0], [4], set()),
        ([(4, 1), (4, 2), (4, 3), (4, 5)], [], [4], {4}),
        # Both: what device 4 has sealed says nothing of those that reveal it.
        ([(4, device) for device in SEEDS] + [(owner, 1) for owner in (5, 6, 7)], [], [4], {4}),
    ],
)
def test_seeds_are_recovered_from_right_shares_and_liars_are_named_if_they_can_be(wrong, silent, lost, liars):
    assert recovered(*dealt(), wrong, silent) == (lost, liars)


def test_who_vouches_for_shares_of_another_seed_has_lied():
    shares, hashes = dealt()
    shares[4] = split_seed(b"another seed, 16", THRESHOLD, MEMBERS)
    hashes[4] = [hash_of_share(share) for share in shares[4]]
    assert recovered(shares, hashes) == ([4], {4})
    assert recovered(shares, hashes, silent=[0, 1, 2]) == ([4], {4})


def test_of_three_nobody_is_blamed_for_one_share():
    shares = split_seed(bytes(16), 3, 3)
    hashes = [hash_of_share(share) for share in shares]
    found = Shares({d: [WRONG if d == 1 else shares[d].hex()] for d in range(3)}, {0: 0, 1: 1, 2: 2}, 3)
    assert found.seed(0, 0, hashes, lambda seed: True) is None
    assert found.liars() == {}
