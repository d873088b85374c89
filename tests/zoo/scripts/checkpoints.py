"""Train a model with a large table, and write a checkpoint every so many steps, synchronously.

``--how`` says with what: torch.save, torch.distributed.checkpoint, or pickle inside ``telemetry.phase``.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import common
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

import telemetry


def save(state: dict, folder: Path, how: str) -> None:
    if how == "dcp":
        dcp.save(state, checkpoint_id=folder / "newest")
    elif how == "pickle":
        with telemetry.phase("checkpoint"), (folder / "newest.pkl").open("wb") as file:
            pickle.dump({name: value.numpy() for name, value in state["model"].items()}, file)
            file.flush()
            os.fsync(file.fileno())
    else:
        torch.save(state, folder / "writing.pt")
        (folder / "writing.pt").replace(folder / "newest.pt")


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--how", choices=("torch", "dcp", "pickle"), default="torch")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--table-megabytes", type=int, default=250)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        data = TensorDataset(torch.rand(512, 3, 64, 64), torch.randint(0, 10, (512,)))
        loader = DataLoader(data, options.batch_size, shuffle=True, **common.loader_settings(options))
        model = common.picture_network(options.width)
        model.register_buffer("table", torch.rand(options.table_megabytes, 1 << 18))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        pace = common.Pace(options)
        step = 0
        while True:
            for pictures, labels in loader:
                common.train_step(model, optimizer, pictures, labels)
                step += 1
                if step % options.checkpoint_every == 0:
                    save({"model": model.state_dict(), "step": torch.tensor(step)}, Path(folder), options.how)
                if pace.step():
                    return


if __name__ == "__main__":
    main()
