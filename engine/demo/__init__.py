"""The bundled demo model: a small Llama checkpoint. `tests/support/demo_model/` holds the scripts that trained it."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
