"""Multiplies once in 8 bits at start: which dtypes torch multiplies depends on its version, CUDA's and the GPU."""

import torch

from kernels.dtypes import dtype_name
from kernels.gpu.linear import linear, pack_quantized
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.targets import Target, UnsupportedTargetError

_SIZE = 64
_NUM_ROWS = (16, 1)


def check_row_scaled_product(
    what: str, dtype: torch.dtype, *, device: torch.device, target: Target, gpu_name: str
) -> None:
    """Multiplies 16 rows and 1 row with a scale per row by weights with a scale per output channel.

    Args:
        what: the flag or file that asks for 8-bit products, for the error.
        dtype: of the model and of results.
        device, target, gpu_name: the GPU.
    Raises: UnsupportedTargetError: this torch cannot compute the product on this GPU; names what to use instead.
    """
    float8 = target.require_fp8(what)
    weight = torch.ones(_SIZE, _SIZE, device=device).to(torch.float8_e4m3fn)
    scales, bias = torch.ones(_SIZE, device=device), torch.ones(_SIZE, dtype=dtype, device=device)
    try:
        for packed in [pack_quantized(weight, scales, b, dtype=dtype, target=target) for b in (None, bias)]:
            for num_rows in _NUM_ROWS:
                rows = torch.ones(num_rows, _SIZE, device=device).to(float8)
                linear(QuantizedRows(rows, torch.ones(num_rows, 1, device=device)), packed)
    except UnsupportedTargetError:
        raise
    except RuntimeError as error:
        instead = "" if dtype is torch.bfloat16 else "use --dtype bfloat16, or "
        raise UnsupportedTargetError(
            f"{what}: torch {torch.__version__} (CUDA {torch.version.cuda}) has no 8-bit products with a scale per row "
            f"in {dtype_name(dtype)} on {gpu_name} ({target.name}): {str(error).splitlines()[0]}; {instead}serve the "
            "model without 8-bit weights"
        ) from error
