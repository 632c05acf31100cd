"""The smoke test of `chairlift up`: streams one completion, then shows how to call the server."""

import shlex
import shutil
import sys
import time

from chairlift import AsyncClient
from chairlift.client.connection import DEFAULT_TARGET, KEY_VARIABLE

_PROMPT = "Once upon a time"
_MAX_TOKENS = 96


async def run_smoke_test(target: str, api_key: str | None) -> None:
    """Streams one completion to standard output, then prints example calls.

    Raises:
        GenerationError: the completion failed.
    """
    async with AsyncClient(target, api_key=api_key) as client:
        model = await client.get_model()
        print(f"\nSmoke test. Prompt: {_PROMPT}\n", flush=True)  # if nobody reads, nothing is generated
        num_tokens = 0
        started_s = time.monotonic()
        max_tokens = min(_MAX_TOKENS, model.max_model_len // 2)
        async with client.stream(_PROMPT, max_tokens=max_tokens, temperature=0.8, seed=1) as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
                num_tokens += chunk.num_tokens
        seconds = time.monotonic() - started_s
        print(f"\n\n({num_tokens} tokens in {seconds:.2f} s)\n")
        print(next_steps(target, model.has_chat_template, with_key=api_key is not None), flush=True)


def next_steps(target: str, has_chat_template: bool, *, with_key: bool) -> str:
    """Returns example calls: from the shell, from Python, with grpcurl."""
    program = "chairlift" if shutil.which("chairlift") else shlex.quote(sys.argv[0])
    where = "" if target == DEFAULT_TARGET else f" --target {target}"
    header = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if with_key else ""
    note = f" (with the key in {KEY_VARIABLE})" if with_key else ""
    lines = [f"Call it from another terminal{note}:", f'  {program} generate "{_PROMPT}" --max-tokens 64{where}']
    if has_chat_template:
        lines.append(f'  {program} generate --chat "Tell me a story."{where}')
    request = '{"spec": {"text": "%s", "stop": {"maxTokens": 64}}}' % _PROMPT  # noqa: UP031 - braces are JSON's
    return "\n".join(
        [
            *lines,
            "from Python:",
            "  from chairlift import Client",
            f'  for chunk in Client("{target}").stream("{_PROMPT}", max_tokens=64):',
            '      print(chunk.text, end="", flush=True)',
            "from anywhere else:",
            f"  grpcurl -plaintext{header} -d '{request}' {target} chairlift.v1.GenerationService/StreamGenerate",
        ]
    )
