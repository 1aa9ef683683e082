"""A node whose ranks have no tensors. As a module it runs, with an EngineConfig in JSON as argument."""

import sys

import msgspec

from engine_core.config import EngineConfig
from engine_core.ranks.node_process import run_node

if __name__ == "__main__":
    sys.exit(run_node(msgspec.json.decode(sys.argv[1], type=EngineConfig), "info", module="fake_rank"))
