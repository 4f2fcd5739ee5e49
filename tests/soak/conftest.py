"""The modules of the soak lie in this folder, where `python tests/soak` finds them too."""

import os
import sys
from pathlib import Path

# Threads that wait sleep, as in __main__.py: read when PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).parent))
