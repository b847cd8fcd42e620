"""What the scripts share: data, rewards, metrics, reports, and how a user's mistake ends a run."""

import sys
from pathlib import Path
from typing import NoReturn


def fail(message: str) -> NoReturn:
    """Ends the run because of a user's mistake, with a sentence instead of a stack trace."""
    sys.exit(f"{Path(sys.argv[0]).name}: error: {message}")
