"""Programs of this folder find each other, and their tests find them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
