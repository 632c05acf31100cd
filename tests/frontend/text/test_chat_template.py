"""Chat templates render as transformers renders them; messages stay text; the sandbox holds."""

import pytest
import tokenizers
import transformers

from frontend.text.chat.messages import ChatMessage
from frontend.text.chat_template import MAX_RENDERED_CHARS, ChatTemplate, ChatTemplateError

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{% endfor %}
{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3_LIKE = """\
{{- bos_token }}
{%- set ns = namespace(system='', first=true) %}
{%- if not tools is none %}{{ raise_exception('no tools here') }}{% endif %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- ns.system }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.content == '' %}{% continue %}{% endif %}
    {%- generation %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_LIKE = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}
{{- message['content'] + eos_token }}
{%- endif %}
{% endfor %}"""

JSON_LIKE = """\
{% for message in messages %}
{{ loop.index }}/{{ loop.length }} {{ message | tojson }}
{{ {'b': 1, 'a': [message.content]} | tojson(indent=2, sort_keys=true) }}
   {% if message.content.startswith('stop') %}{% break %}{% endif %}
{{ message.content.split('x')[0] | upper }} {{ unknown_name }} {{ pad_token }}
{% endfor %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3_LIKE, "mistral": MISTRAL_LIKE, "json": JSON_LIKE}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = {
    "one question": [("user", "Hi there")],
    "dialogue": [("user", " first  "), ("assistant", "answer\n"), ("user", "second")],
    "with system": [("system", "Be brief. "), ("user", "Wörld <b>& 'quotes' \"too\"</b> 🙂"), ("assistant", "ok")],
    "odd contents": [("user", ""), ("assistant", "stop here"), ("user", "{{ 7 * 7 }} {% raw %} \\n <s>")],
}


@pytest.fixture(scope="module")
def reference():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **VARIABLES)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_that_of_transformers(reference, template, conversation):
    turns = CONVERSATIONS[conversation]
    dicts = [{"role": role, "content": content} for role, content in turns]
    ours = ChatTemplate(TEMPLATES[template], VARIABLES)
    try:
        expected = reference.apply_chat_template(
            dicts, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a refusal: ours must be one too, and say the same
        with pytest.raises(ChatTemplateError, match=str(error).replace("/", ".")[:40]):
            ours.render([ChatMessage(*turn) for turn in turns])
    else:
        assert ours.render([ChatMessage(*turn) for turn in turns]) == expected


def test_strftime_now_gives_the_date():
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    assert template.render([ChatMessage("user", "x")]).isdigit()


@pytest.mark.parametrize(
    "payload",
    [
        "{{ 7 * 7 }}",
        "{% for x in range(9) %}{{ x }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception('gotcha') }}",
        "{%- set messages = [] -%}",
        "{# comment #}",
        "${7*7} #{7*7} <%= 7*7 %>",
        "{0.__class__} %(role)s %s",
    ],
)
def test_template_code_in_messages_stays_text(payload):
    for role, content in (("user", payload), (payload, "hello")):
        rendered = ChatTemplate("{% for m in messages %}{{ m.role }}|{{ m.content }}{% endfor %}", {}).render(
            [ChatMessage(role, content)]
        )
        assert rendered == f"{role}|{content}"


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
        "{{ messages.__class__.__base__.__subclasses__()[0] }}",
        "{{ raise_exception.__globals__['json'].x }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self._TemplateReference__context.environment.x }}",
        "{{ ('%s' | attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__.x}'.format(messages) }}",
        "{{ messages.append('more') }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.clear() }}",
        "{{ namespace(x=1).__init__.__globals__.x }}",
        "{{ dict.__subclasses__()[0] }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ lipsum(100000) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_escapes_in_a_template_raise(escape):
    template = ChatTemplate(escape, {})
    with pytest.raises(ChatTemplateError):
        template.render([ChatMessage("user", "hello")])


def test_output_is_bounded():
    template = ChatTemplate(
        "{% for i in range(1000) %}{% for j in range(1000) %}{{ 'ten chars!' }}{% endfor %}{% endfor %}", {}
    )
    with pytest.raises(ChatTemplateError, match=f"more than {MAX_RENDERED_CHARS} characters"):
        template.render([ChatMessage("user", "hello")])


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(ChatTemplateError, match="half a character"):
        ChatTemplate("{{ messages[0].content }}", {}).render([ChatMessage("user", "\ud83d")])


def test_error_contains_the_templates_message():
    with pytest.raises(ChatTemplateError, match=r"^roles must alternate$"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([ChatMessage("user", "x")])


QWEN_LIKE = """\
{% for message in messages %}{% if message.role in ('system', 'user', 'assistant') %}
{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}"""


@pytest.mark.parametrize("role", ["foo", "function", ""])
def test_a_message_of_a_role_that_the_template_leaves_out_is_refused(role):
    messages = [ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage(role, "c"), ChatMessage("foo")]
    with pytest.raises(ChatTemplateError, match=rf"^it leaves out messages\[2\], whose role is '{role}'$"):
        ChatTemplate(QWEN_LIKE, {}).render(messages)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_the_roles_of_openai_are_never_refused(role):
    ChatTemplate(QWEN_LIKE.replace("in (", "in ('x', "), {}).render([ChatMessage("user", "a"), ChatMessage(role, "b")])
    ChatTemplate("{{ messages[0].content }}", {}).render([ChatMessage("user", "a"), ChatMessage(role, "b")])


@pytest.mark.parametrize("template", [CHATML, MISTRAL_LIKE, JSON_LIKE])
def test_templates_that_render_any_role_may_have_their_own(template):
    turns = [ChatMessage("user", "a"), ChatMessage("poet", "roses"), ChatMessage("user", "b")]
    assert "roses" in ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(turns)


def test_syntax_error_names_the_line():
    with pytest.raises(ChatTemplateError, match=r"line 2: .*endfor"):
        ChatTemplate("one\n{% endfor %}", {})


@pytest.mark.parametrize("opening", ["(", "[", "{% if x %}", "{{ x|f("])
def test_template_that_is_nested_too_deeply_cannot_be_compiled(opening):
    source = opening * 20_000 if opening[0] == "{" else "{{ " + opening * 20_000 + " }}"
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {})
