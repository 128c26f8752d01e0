"""The images have what their nodes import: no run on a server stops for a library at its end."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]
DOCKERFILE = Path("deploy/Dockerfile").read_text()
BROUGHT_BY_OTHERS = {"scipy"}  # by scikit-learn


def test_the_servers_image_has_all_of_the_extras_for_servers_and_privacy():
    extras = PROJECT["optional-dependencies"]
    wanted = {re.match(r"[\w-]+", line)[0] for extra in ("server", "privacy") for line in extras[extra]}
    [installed] = re.findall(r"--constraint wheelhouse/constraints\.txt (scikit-learn .*)", DOCKERFILE)
    assert set(installed.split()) == wanted - BROUGHT_BY_OTHERS
