"""Lower bound of the time of a decode step, from the model's shape and the rates measured in the same run.

    t = max(weight bytes / bandwidth, 2 * weights * rows / operations per second) + KV bytes / bandwidth

Assumes perfect operations in sequence; norms, rotations, sampling and everything around the model are free.
"""

from dataclasses import dataclass

from chairlift.bench.shapes import Shape
from engine.bench.cpu_floors import Floors, best_s, fp32_products, int8_products

_TURNS = 7


@dataclass(frozen=True, slots=True)
class DecodeTime:
    """Seconds of decode steps of one shape.

    Attributes:
        weight_bytes: per weight.
        kv_bytes: per element of the KV cache; the scales of an int8 cache are left out.
        read_bytes_per_s, ops_per_s: of the machine; a multiply-add is two operations.
    """

    shape: Shape
    weight_bytes: int
    kv_bytes: int
    read_bytes_per_s: float
    ops_per_s: float

    def seconds(self, num_rows: int, context: int) -> float:
        """Returns the seconds of a step of num_rows rows, each with `context` tokens in the cache."""
        num_weights = self.shape.num_body_weights + self.shape.num_head_weights
        weights_s = num_weights * self.weight_bytes / self.read_bytes_per_s
        products_s = 2 * num_weights * num_rows / self.ops_per_s
        kv_per_token = 2 * self.shape.num_hidden_layers * self.shape.num_key_value_heads * self.shape.head_dim
        cache_s = num_rows * context * kv_per_token * self.kv_bytes / self.read_bytes_per_s
        return max(weights_s, products_s) + cache_s


def peak_ops_per_s(floors: Floors, quantization: str) -> float:
    """Returns the best rate on large matrices, of 8-bit integers ("int8") or fp32 ("none")."""
    return floors.int8_ops if quantization == "int8" else floors.fp32_flops


def library_ops_per_s(quantization: str, num_rows: int, shape: Shape) -> float:
    """Returns PyTorch's best rate with num_rows rows, on matrices of the size of an MLP."""
    products = int8_products if quantization == "int8" else fp32_products
    size_in, size_out = shape.hidden_size, 2 * shape.intermediate_size
    num_ops = 2 * num_rows * size_in * size_out
    return max(num_ops / best_s(product, _TURNS) for product in products(num_rows, size_in, size_out).values())
