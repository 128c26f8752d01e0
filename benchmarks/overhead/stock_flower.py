"""Contestant 3: the app in `flower_app`, by `flwr run` on an own SuperLink with Flower's simulation.

python stock_flower.py DATA_FOLDER ROUNDS ROUNDS_FILE
"""

import sys
import tempfile
from pathlib import Path

from tests.deployment import Deployment
from wildflower.launch.experiment_file import write_toml
from wildflower.launch.superlink import connected, last_lines

APP = Path(__file__).parent / "flower_app"
NODES = 50
OF_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def main(data: str, rounds: int, rounds_file: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "flower", OF_RAY)
        try:
            deployment.start_superlink("--simulation")
            run(deployment, Path(folder), {"data": data, "rounds": rounds, "rounds-file": rounds_file})
        finally:
            deployment.close()


def run(deployment: Deployment, folder: Path, settings: dict[str, object]) -> None:
    config, log = folder / "config.toml", folder / "app.log"
    config.write_text(write_toml(settings), encoding="utf-8")
    workers = f"num-supernodes={NODES} client-resources-num-cpus=1 init-args-num-cpus=2"
    with connected(deployment.address, None) as flower:
        run_id = flower.submit(APP, config, "--federation-config", workers)
        with flower.follow_log(run_id, log) as stream:
            stream.wait()
        status = flower.status(run_id)
        if not status.completed:
            sys.exit(f"{status.status}: {status.details}\n{last_lines(log, 30)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
