"""Model families whose answers can be parsed: each is a row here or a module."""

import re

from frontend.text.chat.argument_marks import ArgumentMarks
from frontend.text.chat.call_family import CallFamily, TemplateSigns
from frontend.text.chat.call_ids import short_call_id
from frontend.text.chat.harmony import HarmonyFamily
from frontend.text.chat.llama3 import Llama3Family
from frontend.text.chat.marked_arguments import MarkedArgumentsFamily
from frontend.text.chat.marked_calls import NAME, MarkedCallFamily
from frontend.text.chat.reasoning import ReasoningMarks

_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"

_KIMI_BEGIN, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"

_MISTRAL_HEADER = rf"\s*{NAME}(?:\[CALL_ID\][\w\-]{{1,64}})?(?:\[ARGS\])?\s*"
_MISTRAL_OTHERS = frozenset({"[CALL_ID]", "[ARGS]"})

CALL_FAMILIES: dict[str, CallFamily] = {
    "harmony": HarmonyFamily(),
    # Mistral's models write a list up to 2024 and names since then; both are parsed the same way.
    "mistral_names": MarkedCallFamily(
        seen=TemplateSigns((("[TOOL_CALLS]", "[ARGS]"),)),
        openings=frozenset({"[TOOL_CALLS]"}),
        others=_MISTRAL_OTHERS,
        lists=True,
        header=_MISTRAL_HEADER,
        written="[TOOL_CALLS]{name}[ARGS]{arguments}",
        new_call_id=short_call_id,
    ),
    "mistral": MarkedCallFamily(
        seen=TemplateSigns((("[TOOL_CALLS]",),)),
        openings=frozenset({"[TOOL_CALLS]"}),
        others=_MISTRAL_OTHERS,
        lists=True,
        header=_MISTRAL_HEADER,
        before="[TOOL_CALLS][",
        written="{object}",
        between=", ",
        after="]",
        new_call_id=short_call_id,
    ),
    "deepseek_v3": MarkedCallFamily(
        seen=TemplateSigns(((_DEEPSEEK_SEPARATOR, "```json"),)),
        openings=frozenset({_DEEPSEEK_BEGIN, _DEEPSEEK_CALL}),
        others=frozenset({_DEEPSEEK_SEPARATOR}),
        header=rf"\s*(?:{_DEEPSEEK_CALL})?\s*function{_DEEPSEEK_SEPARATOR}\s*{NAME}\s*(?:```(?:json)?)?\s*",
        closings=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_END),
        before=_DEEPSEEK_BEGIN,
        written=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}{{name}}\n```json\n{{arguments}}\n```{_DEEPSEEK_CALL_END}",
        between="\n",
        after=_DEEPSEEK_END,
    ),
    "deepseek_v31": MarkedCallFamily(
        seen=TemplateSigns(((_DEEPSEEK_SEPARATOR,),)),
        openings=frozenset({_DEEPSEEK_BEGIN, _DEEPSEEK_CALL}),
        others=frozenset({_DEEPSEEK_SEPARATOR}),
        header=rf"\s*(?:{_DEEPSEEK_CALL})?\s*{NAME}\s*{_DEEPSEEK_SEPARATOR}\s*",
        closings=(_DEEPSEEK_CALL_END, _DEEPSEEK_END),
        before=_DEEPSEEK_BEGIN,
        written=f"{_DEEPSEEK_CALL}{{name}}{_DEEPSEEK_SEPARATOR}{{arguments}}{_DEEPSEEK_CALL_END}",
        after=_DEEPSEEK_END,
    ),
    "kimi_k2": MarkedCallFamily(
        seen=TemplateSigns(((_KIMI_BEGIN,), ("tool_declare<|im_middle|>",))),
        openings=frozenset({_KIMI_BEGIN, _KIMI_CALL}),
        others=frozenset({_KIMI_ARGUMENTS}),
        header=rf"\s*(?:{re.escape(_KIMI_CALL)})?\s*(?P<id>(?:functions\.)?{NAME}:\d{{1,6}})\s*{re.escape(_KIMI_ARGUMENTS)}\s*",
        closings=(_KIMI_CALL_END, _KIMI_END),
        before=_KIMI_BEGIN,
        written=f"{_KIMI_CALL}functions.{{name}}:{{number}}{_KIMI_ARGUMENTS}{{arguments}}{_KIMI_CALL_END}",
        after=_KIMI_END,
    ),
    "glm45": MarkedArgumentsFamily(
        seen=TemplateSigns((("<arg_key>",),)),
        argument_marks=ArgumentMarks(
            openings=frozenset({"<tool_call>"}),
            closings=("</tool_call>",),
            header=re.compile(rf"<tool_call>\s*{NAME}\s*"),
            key="<arg_key>",
            key_end="</arg_key>",
            value="<arg_value>",
            value_end="</arg_value>",
            written_start="<tool_call>{name}\n",
            written_key="<arg_key>{key}</arg_key>\n<arg_value>",
            written_end="</tool_call>",
        ),
    ),
    "qwen3_coder": MarkedArgumentsFamily(
        seen=TemplateSigns((("<tool_call>", "<function=", "<parameter="),)),
        argument_marks=ArgumentMarks(
            openings=frozenset({"<tool_call>", "<function="}),
            closings=("</function>", "</tool_call>"),
            header=re.compile(rf"(?:<tool_call>\s*)?<function=\s*{NAME}\s*>\s*"),
            key="<parameter=",
            key_end=">",
            not_in_key="<\n",
            value="",
            value_end="</parameter>",
            line_break="\n",
            written_start="<tool_call>\n<function={name}>\n",
            written_key="<parameter={key}>\n",
            written_end="</function>\n</tool_call>",
        ),
    ),
    "hermes": MarkedCallFamily(
        # Other formats use the same marks around something else.
        seen=TemplateSigns((("<tool_call>",),), none_of=("<function=",)),
        openings=frozenset({"<tool_call>"}),
        closings=("</tool_call>",),
        written="<tool_call>\n{object}\n</tool_call>",
        between="\n",
    ),
    "phi4_mini": MarkedCallFamily(
        seen=TemplateSigns((("functools[",), ("<|tool|>", "<|/tool|>"))),
        openings=frozenset({"functools", "<|tool_call|>"}),
        lists=True,
        closings=("<|/tool_call|>",),
        before="functools[",
        written="{object}",
        between=", ",
        after="]",
    ),
    "granite": MarkedCallFamily(
        seen=TemplateSigns((("<|tool_call|>",),)),
        openings=frozenset({"<|tool_call|>", "<tool_call>"}),  # Granite 3.1 writes the latter
        lists=True,
        before="<|tool_call|>[",
        written="{object}",
        between=", ",
        after="]",
    ),
    "llama3": Llama3Family(),
}
"""Formats of tool calls by name; "auto" selects the first one with signs in the template."""

REASONING_FAMILIES: dict[str, ReasoningMarks] = {
    "granite32": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "granite": ReasoningMarks("<think>", "</think>", answer=("<response>", "</response>")),
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
}
"""Reasoning marks by name; "auto" selects the first one whose closing mark is in the template."""
