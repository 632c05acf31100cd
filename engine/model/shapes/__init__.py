"""Shapes of common models, for `--load-format dummy`: a folder each, with the figures of the public config.json."""

from pathlib import Path

_FOLDER = Path(__file__).parent


def shape_names() -> list[str]:
    """What can be asked for."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def find_shape(name: str) -> Path | None:
    """The folder of a shape, whatever the case of its name; None if there is none, or if a folder is meant."""
    if name.lower() not in shape_names() or Path(name).is_dir():
        return None
    return _FOLDER / name.lower()
