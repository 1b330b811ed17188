"""Records of conversations and prompts: what is read, and which record is refused with which fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.data.chat_template import BUILT_IN_TEMPLATES, ChatTemplate
from phalanx.data.record_formats import ChatFormat, PreferenceFormat, PromptFormat, RecordFormatError, TextFormat

TEMPLATE = ChatTemplate(BUILT_IN_TEMPLATES["plain"], (("eos_token", "</s>"),))
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
RENDERED = "User: Hi\nAssistant: Hello</s>\n"


def answers(text: Any) -> list[str]:
    return [text.text[start:end] for start, end in text.answers]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{**USER, "tool_calls": None}, {**ASSISTANT, "name": None}], "tools": None},
        {"messages": [USER, ASSISTANT], "tools": "[]"},
    ],
)
def test_conversations_of_all_spellings_are_rendered(row: dict[str, Any]) -> None:
    text = ChatFormat(TEMPLATE).read(row)
    assert text.text == RENDERED
    assert answers(text) == ["Hello</s>"]
    assert text.is_rendered


def test_field_of_messages_has_any_name() -> None:
    assert ChatFormat(TEMPLATE, "dialog").read({"dialog": [USER, ASSISTANT]}).text == RENDERED
    assert ChatFormat(TEMPLATE).columns(["id", "tools", "conversations"]) == ["conversations", "tools"]


def test_answers_with_the_weight_0_are_not_trained_on() -> None:
    """The format of OpenAI's fine-tuning. Templates without tags are compared turn by turn."""
    untagged = BUILT_IN_TEMPLATES["chatml"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for source in (BUILT_IN_TEMPLATES["chatml"], untagged):
        first, second = {**ASSISTANT, "weight": 0}, {**ASSISTANT, "content": "Bye", "weight": 1}
        text = ChatFormat(ChatTemplate(source)).read({"messages": [USER, first, USER, second]})
        assert "Hello<|im_end|>" in text.text
        assert [answer.strip() for answer in answers(text)] == ["Bye<|im_end|>"]


def test_weights_of_records_and_messages_are_multiplied_and_rounded_to_hundredths() -> None:
    conversation = [USER, {**ASSISTANT, "weight": 0.5}, USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]
    text = ChatFormat(TEMPLATE).read({"messages": conversation, "weight": 0.333})
    assert text.weights == (0.17, 0.33)
    assert len(answers(text)) == 2
    assert ChatFormat(TEMPLATE).read({"messages": [USER, ASSISTANT], "weight": 1.0}).weights is None
    assert ChatFormat(TEMPLATE).read({"messages": [USER, ASSISTANT], "weight": 1e-6}).weights == (0.01,)
    assert ChatFormat(TEMPLATE).columns(["messages", "weight"]) == ["messages", "weight"]
    assert PromptFormat().read({"prompt": "2+2=", "completion": " 4", "weight": 2}).weights == (2,)
    # Weights of the prompt's answers have no effect.
    rendered = PromptFormat(TEMPLATE).read({"prompt": [*conversation[:2], USER], "completion": [ASSISTANT]})
    assert rendered.weights is None


def test_prompts_are_texts_or_messages() -> None:
    text = PromptFormat().read({"prompt": "2+2=", "completion": " 4"})
    assert (text.text, answers(text), text.is_rendered) == ("2+2= 4", [" 4"], False)
    assert PromptFormat(TEMPLATE).read({"prompt": [USER], "completion": [ASSISTANT]}).text == RENDERED
    # Only the answers of the completion count, not those of the prompt.
    rendered = PromptFormat(TEMPLATE).read({"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]})
    assert rendered.text == RENDERED + RENDERED
    assert answers(rendered) == ["Hello</s>"]
    assert rendered.answers is not None
    assert rendered.answers[0][0] > len(RENDERED)


def test_completion_has_all_of_its_answers_whatever_spans_a_template_marks() -> None:
    """The template of phi-3 marks the end of a conversation by itself."""
    source = (Path(__file__).parent / "chat_templates" / "phi3_training.jinja").read_text()
    template = ChatTemplate(source, (("bos_token", ""), ("eos_token", "<eos>")))
    row = {"prompt": [USER, ASSISTANT, USER], "completion": [{"role": "assistant", "content": "ANSWER"}]}
    assert "".join(answers(PromptFormat(template).read(row))).strip() == "ANSWER<|end|>\n<eos>"


@pytest.mark.parametrize(
    ("kind", "row", "problem", "fix"),
    [
        ("chat", {"dialog": [USER, ASSISTANT]}, "has no list", 'set data.text_key = "dialog"'),
        ("chat", {"prompt": "a", "completion": "b"}, "has no list", 'set data.format = "prompt"'),
        ("chat", {"text": "a"}, "has no list", 'set data.format = "text"'),
        ("chat", ["a"], "has no list", "correct or remove this record"),
        ("chat", {"messages": []}, "has no messages", "role and content"),
        ("chat", {"messages": "hello"}, "has no messages", "role and content"),
        ("chat", {"messages": ["hello"]}, "message 1 in .* is not an object", "role and content"),
        ("chat", {"messages": [{"content": "a"}]}, "message 1 in .* without a role", "role and content"),
        ("chat", {"messages": [USER, {"role": "assistant"}]}, "message 2 in .* without content", "role and content"),
        ("chat", {"messages": [USER]}, "has no message of the assistant", "remove it"),
        ("chat", {"messages": [USER, {**ASSISTANT, "weight": 0}]}, "has answers with the weight 0 only", "remove it"),
        (
            "chat",
            {"messages": [USER, {**ASSISTANT, "weight": 11}]},
            "a message 2 with the weight 11",
            "only their ratios",
        ),
        ("chat", {"messages": [USER, ASSISTANT], "weight": "high"}, "a weight 'high' in", "a number from 0 to 10"),
        ("chat", {"messages": [USER, ASSISTANT], "weight": -1}, "a weight -1 in", "a number from 0 to 10"),
        ("chat", {"messages": [USER, ASSISTANT], "weight": 0}, "has answers with the weight 0 only", "remove it"),
        ("chat", {"messages": [USER, {**ASSISTANT, "weight": 5}], "weight": 3}, "whose product is 15", "divide"),
        ("prompt", {"prompt": "a", "completion": "b", "weight": float("nan")}, "a weight nan", "a number from 0 to 10"),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0.5},
            "a weight other than 1",
            "remove",
        ),
        (
            "preference",
            {"prompt": [USER], "chosen": [{**ASSISTANT, "weight": 2}], "rejected": [{**ASSISTANT, "content": "No"}]},
            "a weight other than 1",
            "remove",
        ),
        ("chat", {"messages": [{**USER, "role": "usr"}, ASSISTANT]}, "the role 'usr' in message 1", "did you mean"),
        ("chat", {"messages": [USER, ASSISTANT], "tools": "[{"}, "tools in .* not valid JSON", "correct"),
        ("prompt", {"prompt": "a"}, "has no field 'completion'", ""),
        ("prompt", {"messages": [USER]}, "has no field 'prompt' and 'completion'", 'set data.format = "chat"'),
        ("prompt", {"prompt": "a", "completion": ""}, "empty completion", "remove"),
        ("prompt", {"prompt": 1, "completion": "b"}, "not two texts", "correct"),
        ("prompt", {"prompt": [USER], "completion": [USER]}, "without a message of the assistant|no message", ""),
        ("text", {"messages": [USER, ASSISTANT]}, "not a field", 'set data.format = "chat"'),
        ("text", {"prompt": "a", "completion": "b"}, "not a field", 'set data.format = "prompt"'),
    ],
)
def test_records_of_other_formats_are_refused_with_a_fix(kind: str, row: Any, problem: str, fix: str) -> None:
    formats = (ChatFormat(TEMPLATE), PromptFormat(TEMPLATE), PreferenceFormat(TEMPLATE), TextFormat())
    record_format = next(each for each in formats if each.kind == kind)
    with pytest.raises(RecordFormatError, match=problem) as caught:
        record_format.read(row)
    assert fix in caught.value.fix
