"""A replica of recovery.py under torchft: PYTHON torchft_worker.py MODEL REPLICA LIGHTHOUSE LOG

Needs torchft (pip install torchft-nightly), which is no dependency of acsgd. Writes a line of JSON per step that all
replicas have agreed on, as metrics.jsonl has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]
from transformers import AutoConfig, AutoModelForCausalLM

SEQUENCE = 32
TIMEOUT = timedelta(seconds=30)


def main() -> None:
    """Train until the process is killed."""
    directory, replica, lighthouse, log = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=replica,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=TIMEOUT,
    )
    replicated, wrapped = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    tokens = torch.randint(model.config.vocab_size, (1, SEQUENCE))
    while True:
        wrapped.zero_grad()
        replicated(input_ids=tokens, labels=tokens).loss.backward()
        wrapped.step()
        line = {"step": manager.current_step(), "replicas": manager.num_participants(), "pid": os.getpid()}
        with Path(log).open("a") as file:
            file.write(json.dumps(line | {"at": time.monotonic()}) + "\n")


if __name__ == "__main__":
    main()
