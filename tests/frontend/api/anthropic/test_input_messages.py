"""Conversion of Messages requests to the turns that a chat template gets."""

import pytest

from frontend.api.anthropic.bodies import MessagesBody
from frontend.slices import at_once
from frontend.text.chat.messages import ChatMessage, ToolCall

CALL = {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}, "id": "c1"}
RESULT = {"type": "tool_result", "content": "sunny", "tool_use_id": "c1"}
TURNS = [
    ChatMessage("system", "be brief"),
    ChatMessage("user", "hi"),
    ChatMessage("assistant", "Hello."),
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", tool_calls=(ToolCall("c1", "weather", '{"city": "Rome"}'),)),
    ChatMessage("tool", "sunny", name="weather", tool_call_id="c1"),
]
CLIENTS = {
    "LangChain": {
        "system": "be brief",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [{**RESULT, "is_error": False}]},
        ],
    },
    "AI SDK": {
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT]},
        ],
    },
    "anthropic": {
        "system": "be brief",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"citations": None, "text": "Hello.", "type": "text"}]},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [{**CALL, "caller": None, "toolset_name": None}]},
            {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "sunny"}]}]},
        ],
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
    },
}


def conversation(**body):
    return at_once(MessagesBody.model_validate({"max_tokens": 1, **body}).chat())


@pytest.mark.parametrize("client", CLIENTS)
def test_equivalent_messages_become_the_same_turns(client):
    assert list(conversation(**CLIENTS[client]).messages) == TURNS
    body = MessagesBody.model_validate({"max_tokens": 1, **CLIENTS[client]})
    assert list(body.unknown_parameters()) == []


def test_results_and_words_of_one_message_are_turns_in_order():
    blocks = [RESULT, {**RESULT, "tool_use_id": "c2", "content": None}, *({"type": "text", "text": "a"},) * 2, RESULT]
    turns = conversation(messages=[{"role": "user", "content": blocks}]).messages
    assert [(turn.role, turn.content) for turn in turns] == [
        *(("tool", "sunny"), ("tool", ""), ("user", ("a", "a")), ("tool", "sunny"))
    ]


def test_consecutive_messages_of_one_role_are_one_turn():
    def said(role, *content):
        return {"role": role, "content": list(content) if len(content) > 1 else content[0]}

    text, thought = {"type": "text", "text": "c"}, {"type": "thinking", "thinking": "hm", "signature": "s"}
    messages = [
        *(said("user", "a"), said("user", "b"), said("user", text, text)),
        *(said("assistant", "x"), said("assistant", thought, {**text, "text": "y"}), said("assistant", CALL, CALL)),
        *(said("user", RESULT, RESULT), said("user", "d"), said("user", "e"), said("assistant", "z")),
    ]
    chat = conversation(messages=messages)
    call = ToolCall("c1", "weather", '{"city": "Rome"}')
    assert list(chat.messages) == [
        ChatMessage("user", ("a", "b", "c", "c")),
        ChatMessage("assistant", ("x", "y"), reasoning="hm", tool_calls=(call, call)),
        *(ChatMessage("tool", "sunny", name="weather", tool_call_id="c1"),) * 2,
        ChatMessage("user", ("d", "e")),
        ChatMessage("assistant", "z"),
    ]
    assert chat.options.continue_final_message


BILLING = "x-anthropic-billing-header: cc_version=2.1.197.3e6; cc_entrypoint=sdk-cli; cch=fa690;"


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "be brief"}], "be brief"),
        ([{"type": "text", "text": f"{BILLING}be"}, {"type": "text", "text": "brief"}], ("be", "brief")),
        (f"{BILLING}\nbe brief", "be brief"),
        (f"be brief {BILLING}", f"be brief {BILLING}"),
        ("x-anthropic-billing-header: is one", "x-anthropic-billing-header: is one"),
    ],
)
def test_claude_codes_billing_header_is_no_part_of_the_prompt(system, content):
    turns = conversation(system=system, messages=[{"role": "user", "content": "hi"}]).messages
    assert list(turns) == [ChatMessage("system", content), ChatMessage("user", "hi")]


def test_a_billing_header_alone_is_no_system_turn():
    turns = conversation(system=BILLING, messages=[{"role": "user", "content": "hi"}]).messages
    assert list(turns) == [ChatMessage("user", "hi")]


def test_system_message_after_the_start_is_a_reminder_of_the_user():  # as Claude Code 2.1 sends them
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "system", "content": "Agents: none"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{**RESULT, "is_error": False, "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": [{"type": "text", "text": "be quick"}]},
    ]
    turns = conversation(system="be kind", messages=messages).messages
    assert [(turn.role, turn.content) for turn in turns] == [
        ("system", ("be kind", "be brief")),
        ("user", ("hi", "<system-reminder>\nAgents: none\n</system-reminder>")),
        ("assistant", ""),
        ("tool", "sunny"),
        ("user", "<system-reminder>\nbe quick\n</system-reminder>"),
    ]


def test_only_a_last_word_of_the_assistant_is_continued():
    said, called = {"role": "assistant", "content": "x"}, {"role": "assistant", "content": [CALL]}
    assert conversation(messages=[said]).options.continue_final_message
    assert not conversation(messages=[called]).options.continue_final_message
    assert not conversation(messages=[said, {"role": "user", "content": "y"}]).options.continue_final_message


def test_large_conversation_is_read_in_slices():
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": [{"role": "user", "content": "x"}] * 1000})
    assert sum(1 for _ in body.chat()) >= 1000
