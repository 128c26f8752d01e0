"""Contestant 3: the app in `flower_app`, started as `wildflower run` starts an app: `flwr run` on an own SuperLink.

python stock_flower.py DATA_FOLDER ROUNDS ROUNDS_FILE
"""

import sys
import tempfile
from pathlib import Path

from wildflower.launch.experiment_file import write_toml
from wildflower.launch.superlink import last_lines, superlink

APP = Path(__file__).parent / "flower_app"
NODES = 50


def main(data: str, rounds: int, rounds_file: str) -> None:
    with tempfile.TemporaryDirectory() as folder, superlink(Path(folder) / "superlink.log") as flower:
        config, log = Path(folder) / "config.toml", Path(folder) / "app.log"
        settings = {"data": data, "rounds": rounds, "rounds-file": rounds_file}
        config.write_text(write_toml(settings), encoding="utf-8")
        workers = {"num-supernodes": NODES, "client-resources-num-cpus": 1, "init-args-num-cpus": 2}
        run_id = flower.submit(APP, config, workers)
        flower.follow_log(run_id, log).wait()
        status = flower.status(run_id)
        if not status.completed:
            sys.exit(f"{status.status}: {status.details}\n{last_lines(log, 30)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
