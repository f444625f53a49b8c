"""The small trained model that comes with the package; see its README.md for data and figures."""

from pathlib import Path

NAME = "lara-kjv"


def bundled_model() -> Path:
    """The directory of the bundled model, in Hugging Face format."""
    return Path(__file__).parent / NAME
