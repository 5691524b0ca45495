"""Chat templates of the kinds that served models have, written here."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from prompt_builder.template import ChatTemplate, NoTemplate, TemplateRefused
from prompt_builder.types import Role

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
SYSTEM_IN_LAST = """{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- for message in messages if message['role'] != 'system' %}
{%- if message['role'] == 'user' %}[INST]{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}
{{- message['content'] }}[/INST]
{%- else %}{{ message['content'] }}</s>{% endif %}
{%- endfor %}"""

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_scaffolding_and_contents_join_to_what_the_template_renders() -> None:
    pieces = ChatTemplate(CHATML).scaffold(("system", "user", "assistant", "user"))
    contents = ["Be kind.", "Hello", "Hi!", "Bye", ""]
    text = "".join(piece + content for piece, content in zip(pieces, contents, strict=True))
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("source", [CHATML, LLAMA], ids=["chatml", "llama"])
def test_a1_a_longer_conversation_begins_with_the_scaffolding_of_the_shorter(source: str) -> None:
    template = ChatTemplate(source, TOKENS)
    short = template.scaffold(("system", "user"))
    longer = template.scaffold(("system", "user", "assistant", "user"))
    assert longer[:2] == short[:2]
    assert longer[2].startswith(short[2])


def test_a3_a_clock_in_the_template_is_noticed_and_stands_still() -> None:
    template = ChatTemplate(LLAMA, TOKENS)
    assert template.holds_clock
    assert "26 Jul 2024" in template.scaffold(("user",))[0]
    assert not ChatTemplate(CHATML).holds_clock


def test_b6_a_template_that_refuses_two_user_messages_in_a_row_says_so_in_its_own_words() -> None:
    template = ChatTemplate(MISTRAL, TOKENS)
    assert template.scaffold(("user", "assistant", "user")) == ("<s>[INST] ", " [/INST]", "</s>[INST] ", " [/INST]")
    for _ in range(2):
        with pytest.raises(TemplateRefused, match="must alternate"):
            template.scaffold(("user", "user"))


@pytest.mark.parametrize("source", [MISTRAL, GEMMA, SYSTEM_IN_LAST], ids=["mistral", "gemma", "system in last"])
def test_templates_without_a_place_for_a_system_message_are_noticed(source: str) -> None:
    template = ChatTemplate(source, TOKENS)
    assert not template.accepts_system
    assert len(template.scaffold(("user", "assistant", "user"))) == 4


def test_templates_with_a_system_role_are_noticed() -> None:
    assert ChatTemplate(CHATML).accepts_system
    assert ChatTemplate(LLAMA, TOKENS).accepts_system


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[-1]['content'] }}",
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}",
        "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{{ messages.nothing.there }}",
        "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_drops_repeats_moves_or_changes_contents_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source).scaffold(("user", "assistant"))


def test_templates_run_in_a_sandbox() -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[0]['content'] }}"
    with pytest.raises(TemplateRefused):
        ChatTemplate(escape).scaffold(("user",))


def test_what_transformers_offers_templates_is_there() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{{ {'b': 'é<'} | tojson }}{% if loop.first %}{% continue %}{% endif %}.{% endfor %}"
    )
    assert ChatTemplate(source).scaffold(("user", "user")) == ("", '{"b": "é<"}', '{"b": "é<"}.')


def test_a_model_folder_is_read_in_both_of_its_forms(tmp_path: Path) -> None:
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": MISTRAL}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).scaffold(("user",)) == ("<s>[INST] ", " [/INST]")
    config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": GEMMA}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).scaffold(("user",))[0] == "<s><start_of_turn>user\n"
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.load(tmp_path).scaffold(("user",))[0] == "<|im_start|>user\n"


def test_a_folder_without_a_usable_template_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NoTemplate, match="no chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(NoTemplate, match="does not parse"):
        ChatTemplate.load(tmp_path)


def test_the_longest_history_that_is_taken_is_cut_in_linear_time() -> None:
    roles: tuple[Role, ...] = ("user", "assistant") * 9_999 + ("user",)
    began = time.perf_counter()
    pieces = ChatTemplate(CHATML).scaffold(roles)
    assert time.perf_counter() - began < 2.0
    assert len(pieces) == len(roles) + 1
    assert len({id(piece) for piece in pieces}) <= 4


def test_scaffolding_may_be_asked_for_from_many_threads() -> None:
    template = ChatTemplate(CHATML, cached_role_tuples=1)
    histories = [("user", "assistant") * turns + ("user",) for turns in range(4)] * 200
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(template.scaffold, histories))
    assert [len(found) for found in pieces] == [len(roles) + 1 for roles in histories]
