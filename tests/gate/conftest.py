"""The gate is scripts, not a package: its tests find them as a started script does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
