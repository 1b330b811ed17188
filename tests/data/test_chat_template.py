"""Texts and masks of conversations equal those of transformers, by templates that TRL publishes (chat_templates/)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate, ConversationError, check_template
from phalanx.data.sources import Document
from phalanx.data.tokenize import tokenize_documents
from phalanx.data.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "chat_templates"
TAGGED = sorted(file.stem.removesuffix("_training") for file in TEMPLATES.glob("*_training.jinja"))
UNTAGGED = sorted(file.stem for file in TEMPLATES.glob("*.jinja") if not file.stem.endswith("_training"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIAL_PATTERN = r"<\|[^|>]{1,40}\|>|<｜[^｜>]{1,40}｜>|<(?:start|end)_of_turn>|</?think>"  # noqa: RUF001 -- of DeepSeek

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4.\n\nÄnderungen <b>vorbehalten</b>."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTION, ANSWER],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        ANSWER,
        {"role": "user", "content": "  And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ],
    "tools": [
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "name": "weather", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
WITHOUT_TOOLS = {"cohere2", "gemma3", "lfm2", "llama3", "phi3"}
"""Templates that do not render tool calls, and refuse or leave out the results of tools."""


def bytes_with_special_tokens(template: str) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes with the special tokens that a template names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    names = sorted({*re.findall(SPECIAL_PATTERN, template), *SPECIAL.values()})
    model.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return model


def tokens_and_mask(
    template: str, messages: list[dict[str, Any]], tools: Any, model: Any
) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and 1 for those that are trained on, as runs are."""
    text, spans = ChatTemplate(template, tuple(SPECIAL.items())).render_answers(messages, tools)
    own = Tokenizer(model.get_vocab_size(), 0, model)
    ((_, tokens),) = tokenize_documents([Document("a", text, answers=tuple(spans), is_rendered=True)], own, end=True)
    return np.where(tokens < 0, ~tokens, tokens).tolist(), (tokens >= 0).astype(int).tolist()


def reference(template: str, messages: list[dict[str, Any]], tools: Any, model: Any) -> tuple[list[int], list[int]]:
    hf = PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)
    encoded = hf.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return encoded["input_ids"], encoded["assistant_masks"]


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", TAGGED)
def test_masks_of_tagged_templates_equal_those_of_transformers(name: str, kind: str) -> None:
    if kind == "tools" and name in WITHOUT_TOOLS:
        kind = "one turn"
    template = (TEMPLATES / f"{name}_training.jinja").read_text()
    model = bytes_with_special_tokens(template)
    tools = TOOLS if kind == "tools" else None
    expected = reference(template, CONVERSATIONS[kind], tools, model)
    assert 0 < sum(expected[1]) < len(expected[1])
    assert tokens_and_mask(template, CONVERSATIONS[kind], tools, model) == expected


@pytest.mark.parametrize("name", UNTAGGED)
def test_compared_conversations_have_the_masks_of_tags(name: str) -> None:
    """TRL has each of these templates a second time, with tags around answers."""
    tagged = (TEMPLATES / f"{name}_training.jinja").read_text()
    untagged = (TEMPLATES / f"{name}.jinja").read_text()
    assert "generation %}" not in untagged
    model = bytes_with_special_tokens(tagged)
    num_compared = 0
    for kind, messages in CONVERSATIONS.items():
        # The second template of Qwen3 keeps the reasoning of earlier turns.
        if (kind == "tools" and name in WITHOUT_TOOLS) or (kind != "one turn" and name == "qwen3"):
            continue
        tools = TOOLS if kind == "tools" else None
        assert tokens_and_mask(untagged, messages, tools, model) == reference(tagged, messages, tools, model), kind
        num_compared += 1
    assert num_compared


def test_template_that_hides_earlier_reasoning_has_all_answers() -> None:
    template = ChatTemplate((TEMPLATES / "qwen3.jinja").read_text())
    text, spans = template.render_answers(CONVERSATIONS["system and turns"])
    first, last = (text[start:end] for start, end in spans)
    assert first == f"{ANSWER['content']}<|im_end|>\n"
    assert last == "<think>\n\n</think>\n\n6<|im_end|>\n"


@pytest.mark.parametrize("name", BUILT_IN_TEMPLATES)
def test_built_in_templates_equal_transformers(name: str) -> None:
    template = BUILT_IN_TEMPLATES[name]
    model = bytes_with_special_tokens("<|im_start|><|im_end|>")
    messages = CONVERSATIONS["system and turns"]
    assert tokens_and_mask(template, messages, None, model) == reference(template, messages, None, model)
    hf = PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)
    prompt = hf.apply_chat_template(messages[:2], chat_template=template, tokenize=False, add_generation_prompt=True)
    own = ChatTemplate(template, tuple(SPECIAL.items()))
    assert own.render(messages[:2], add_generation_prompt=True) == prompt
    assert own.render(messages).startswith(prompt)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}{{ m.content.missing.more }}{% endfor %}", "refused by the chat template"),
        ("{{ messages | length }}", "differently in longer conversations"),
        ("{% generation %}{% endgeneration %}", "no turn of the assistant"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused by the chat template"),  # the sandbox
        ("{% for n in range(10 ** 9) %}{% endfor %}", "refused by the chat template"),
    ],
)
def test_conversations_without_clear_answers_are_refused(template: str, problem: str) -> None:
    with pytest.raises(ConversationError, match=problem):
        ChatTemplate(template).render_answers(CONVERSATIONS["one turn"])


CALLING: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": "I ask."}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in BUILT_IN_TEMPLATES for content in CALLING),
        *((name, {"content": ""}) for name in sorted(WITHOUT_TOOLS)),
    ],
)
def test_tool_calls_that_a_template_drops_are_refused(name: str, content: dict[str, Any]) -> None:
    """An answer of calls alone would be trained as an empty one."""
    user, calling, *_ = CONVERSATIONS["tools"]
    call = {"role": "assistant", "tool_calls": calling["tool_calls"], **content}
    source = BUILT_IN_TEMPLATES.get(name) or (TEMPLATES / f"{name}.jinja").read_text()
    template = ChatTemplate(source, tuple(SPECIAL.items()))
    with pytest.raises(ConversationError, match="tool calls in message 2, which the chat template does not render"):
        template.render_answers([user, call, user, ANSWER])


def test_characters_that_mark_answers_are_refused() -> None:
    messages = [{"role": "user", "content": "a\ufdd0b\ufdd1"}, ANSWER]
    with pytest.raises(ConversationError, match=r"U\+FDD0"):
        ChatTemplate(BUILT_IN_TEMPLATES["plain"]).render_answers(messages)


def test_syntax_of_templates_is_checked() -> None:
    assert check_template("{{ messages }}") is None
    assert "line 2" in str(check_template("{{ messages }}\n{% if %}"))
