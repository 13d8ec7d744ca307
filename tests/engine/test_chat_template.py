"""Templates render as transformers renders them, cannot reach out of their sandbox, and fail in one line."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from pagetier.engine.chat_template import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Ho <b> & é"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = (
    SMOLLM2,
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n[U]{{ m.content | trim }}\n"
    "    {% else %}\n[A]{{ m.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}\n",
    "{% for m in messages %}{% if m.role != 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools | tojson }}",
    "{% if tools is none %}no tools{% else %}{{ tools[0].function.name }}{% endif %}{{ documents }}{{ nothing }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[-1].content) }}{{ extra }}",
)


def theirs(template: str, messages: list[dict[str, Any]], prompt: bool, **kwargs: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    rendered = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=prompt, **tokens, **kwargs
    )[0]
    return str(rendered[0])


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(template: str, prompt: bool, tools: Any) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [USER, ASSISTANT, USER]
    expected = theirs(template, messages, prompt, tools=tools, extra="x")
    assert ours.render(messages, prompt, tools=tools, extra="x") == expected


def test_the_date_is_todays() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])
    assert abs(int(text) - datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", r"Expected an expression.* \(line 1\)"),
        ("{% for m in messages %}", r"Unexpected end of template.* \(line 1\)"),
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing() }}", "'nothing' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it recurses without end"),
        ("{{ range(10000000) | list | length }}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe|is not safely callable"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ [1, object] | tojson }}", "not JSON serializable"),
    ],
)
def test_failures_are_one_line(template: str, says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says) as caught:
        ChatTemplate(template, {}).render([USER])
    assert str(caught.value).startswith("chat template: ") and "\n" not in str(caught.value)


def test_a_message_the_template_cannot_take_is_one_line() -> None:
    template = ChatTemplate(SMOLLM2, {})
    with pytest.raises(ChatTemplateError, match="can only concatenate str"):
        template.render([{"role": "user", "content": None}])
    assert template.render([USER]).endswith("<|im_start|>assistant\n")


def test_rendering_changes_no_message() -> None:
    messages = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages[0].update({'role': 'x'}) }}", {}).render(messages)
    assert messages == [USER]
