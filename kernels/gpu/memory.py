"""Free memory of a GPU."""

import torch


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of the GPU, for this and all other processes.

    Blocks that torch's allocator only caches are freed first. Otherwise they count as used, and as freed when the next
    capture of a CUDA graph empties the cache.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
