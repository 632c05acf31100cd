from collections.abc import Callable
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.lifecycle import finish_reason
from engine.core.request import Request

END = frozenset({0, 9})


@pytest.mark.parametrize(
    ("output_ids", "params", "max_model_len", "expected"),
    [
        ([], {}, 100, None),
        ([5], {}, 100, None),
        ([5, 0], {}, 100, EndReason.END_TOKEN),
        ([9], {}, 100, EndReason.END_TOKEN),
        ([0, 5], {}, 100, None),  # only the newest token counts
        ([0], {"ignore_end_token": True}, 100, None),
        ([0], {"ignore_end_token": True, "stop_token_ids": (0,)}, 100, EndReason.STOP_TOKEN),
        ([7], {"stop_token_ids": (6, 7)}, 100, EndReason.STOP_TOKEN),
        ([0], {"stop_token_ids": (0,)}, 100, EndReason.END_TOKEN),
        ([0], {"min_tokens": 2}, 100, None),
        ([7], {"min_tokens": 2, "stop_token_ids": (7,)}, 100, None),
        ([5, 0], {"min_tokens": 2}, 100, EndReason.END_TOKEN),
        ([5, 5, 5, 5], {}, 100, EndReason.MAX_TOKENS),
        ([5, 5, 5, 0], {}, 100, EndReason.END_TOKEN),  # ends by itself with its last token
        ([5, 5, 5, 5], {"min_tokens": 8}, 100, EndReason.MAX_TOKENS),
        ([5, 5], {}, 5, EndReason.CONTEXT_FULL),
        ([5, 5, 5, 5], {}, 7, EndReason.MAX_TOKENS),
    ],
)
def test_finish_reason(
    make_request: Callable[..., Request],
    output_ids: list[int],
    params: dict[str, Any],
    max_model_len: int,
    expected: EndReason | None,
) -> None:
    request = make_request(1, 3, max_tokens=4, output_ids=output_ids, **params)
    request.max_num_tokens = min(3 + 4, max_model_len)
    assert finish_reason(request, END) is expected
