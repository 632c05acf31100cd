"""The bundled demo model: a small Llama checkpoint trained here, and the scripts that made it.

Importing this package gives only the checkpoint's folder, so that finding the default model never costs an import of
torch.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
