"""Lets the tests here import each other's games."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
