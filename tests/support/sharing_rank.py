"""The process of one rank of an engine that shares experts with others."""

from __future__ import annotations

import sys

from sharing_engine import SharingRank

from worker import rank_process as process

if __name__ == "__main__":
    sys.exit(process.main(SharingRank))
