from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples in every run: what fails here fails there.
settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("seeded")


@pytest.fixture(scope="session", autouse=True)
def _own_cache_and_one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache folder; digits are decoded once for all of them."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WILDFLOWER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
