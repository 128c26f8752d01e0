"""All architectures of a search space that is small."""

import itertools


def all_picks(space):
    """Return the picks of each architecture."""
    found = itertools.product(*(range(len(options)) for options in space.options))
    return [picks for picks in found if space.canonical(picks) == picks and space.keeps_enough(picks)]


def all_of(space):
    """Return each architecture."""
    return [space.architecture(picks) for picks in all_picks(space)]
