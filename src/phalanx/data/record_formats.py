"""Formats of the records of a source: text, conversations, prompts with their answers, or pairs of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from phalanx.data.chat_template import (
    ASSISTANT,
    ChatTemplate,
    ConversationError,
    Message,
    Span,
    common_beginning,
)
from phalanx.data.packing import MAX_WEIGHT, WEIGHT_STEPS
from phalanx.spec.base import did_you_mean
from phalanx.spec.mixture import RecordKind

TEXT_KEY = "text"
CONVERSATION_FIELDS = ("messages", "conversations")
PROMPT_FIELD = "prompt"
COMPLETION_FIELD = "completion"
ANSWER_FIELDS = ("chosen", "rejected")
TOOLS_FIELD = "tools"
WEIGHT_FIELD = "weight"
"""Field of a conversation, a prompt with its completion, or a message of the assistant: a factor of its loss.

Answers with 0 are not trained on. Sources: OpenAI, "Fine-tuning", multi-turn chat examples (0 or 1 of a message);
Fireworks, "Weighted training" (any number of a conversation)."""
ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Roles of `conversations` with `from` and `value`, and those of templates."""


USUAL_ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""Roles that every template may get. A template may have others of its own."""


class RecordFormatError(ValueError):
    """A record that is not of its format, with a fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True)
class RecordText:
    """The text of a record."""

    text: str
    answers: tuple[Span, ...] | None = None
    """Characters that are trained on; None: all."""
    weights: tuple[float, ...] | None = None
    """Factor of the loss of each answer; None: 1."""
    is_rendered: bool = False
    """True for the text of a chat template, in which special tokens are tokens, and which has its own end."""
    rejected: RecordText | None = None
    """The text with the rejected answer, if this one has the chosen one."""


class RecordFormat(Protocol):
    """How records become text."""

    @property
    def key(self) -> str:
        """Name of the field in errors."""

    @property
    def kind(self) -> RecordKind:
        """Name of the format in run files."""

    def columns(self, available: Sequence[str]) -> list[str]:
        """Return the columns to read of a table, of those that it has; none if it is not of this format."""

    def is_record(self, row: Any) -> bool:
        """Return whether a value is a record of this format, possibly without text."""

    def read(self, row: Any) -> RecordText:
        """Return the text of a record. Raises RecordFormatError if it is not of this format."""


@dataclass(frozen=True)
class TextFormat:
    """Records whose field `key` is text."""

    key: str = TEXT_KEY
    kind: RecordKind = "text"

    def columns(self, available: Sequence[str]) -> list[str]:
        """Return the column of the text."""
        return [self.key] if list(available).count(self.key) == 1 else []

    def is_record(self, row: Any) -> bool:
        """Return whether a value is a record with text, or with null in place of it."""
        return isinstance(row, dict) and self.key in row and isinstance(row[self.key], str | None)

    def read(self, row: Any) -> RecordText:
        """Return the text. Raises RecordFormatError if there is none."""
        if isinstance(row, dict) and isinstance(text := row.get(self.key), str):
            return RecordText(text)
        if not isinstance(row, dict):
            fix = "write JSON objects, one per line or in an array"
            raise RecordFormatError("is a field of JSON objects, and {} is none", fix)
        if self.key not in row:
            raise RecordFormatError("is not a field of {}", self._suggest_text(row))
        problem = f"is not a text field: its value in {{}} has type {type(row[self.key]).__name__}"
        raise RecordFormatError(problem, self._suggest_text(row))

    def _suggest_text(self, row: dict[str, Any]) -> str:
        if any(isinstance(row.get(name), list) for name in CONVERSATION_FIELDS):
            return 'set data.format = "chat" for conversations'
        if isinstance(row.get(PROMPT_FIELD), str) and isinstance(row.get(COMPLETION_FIELD), str):
            return 'set data.format = "prompt" for prompts with completions'
        if all(name in row for name in ANSWER_FIELDS):
            return 'set data.format = "preference" for pairs of answers'
        if text_fields := [name for name, value in row.items() if isinstance(value, str)]:
            return f"use one of its text fields: {', '.join(map(repr, text_fields))}"
        return "correct or remove this record" if self.key in row else f"add a text field {self.key!r} to each record"


@dataclass(frozen=True)
class ChatFormat:
    """Conversations, in the field `field` or one of `CONVERSATION_FIELDS`, and perhaps the field `tools`."""

    template: ChatTemplate
    field: str | None = None
    kind: RecordKind = "chat"

    @property
    def key(self) -> str:
        """Name of the field in errors."""
        return self.field or CONVERSATION_FIELDS[0]

    def _field_of(self, names: Any) -> str | None:
        return next((name for name in ([self.field] if self.field else CONVERSATION_FIELDS) if name in names), None)

    def columns(self, available: Sequence[str]) -> list[str]:
        """Return the columns of messages, tools and weights."""
        field = self._field_of(available)
        return [] if field is None else [field, *_optional_columns(available)]

    def is_record(self, row: Any) -> bool:
        """Return whether a value is an object with a list of messages."""
        return isinstance(row, dict) and (field := self._field_of(row)) is not None and isinstance(row[field], list)

    def read(self, row: Any) -> RecordText:
        """Render a conversation. Raises RecordFormatError if it is none, or the template refuses it."""
        field = self._field_of(row) if isinstance(row, dict) else None
        if field is None:
            names = repr(self.field) if self.field else "'messages' or 'conversations'"
            raise RecordFormatError(f"is not a conversation: {{}} has no list {names}", _suggest_format(row))
        messages = _read_messages(row[field])
        return _render(self.template, messages, row)


@dataclass(frozen=True)
class PromptFormat:
    """Prompts with completions, each a text; or each a list of messages, if there is a template."""

    template: ChatTemplate | None = None
    kind: RecordKind = "prompt"
    key: str = PROMPT_FIELD

    def columns(self, available: Sequence[str]) -> list[str]:
        """Return the columns of prompts, completions, tools and weights."""
        if not {PROMPT_FIELD, COMPLETION_FIELD} <= set(available):
            return []
        return [PROMPT_FIELD, COMPLETION_FIELD, *_optional_columns(available)]

    def is_record(self, row: Any) -> bool:
        """Return whether a value is an object with a prompt and a completion."""
        return isinstance(row, dict) and PROMPT_FIELD in row and COMPLETION_FIELD in row

    def read(self, row: Any) -> RecordText:
        """Return prompt and completion, of which only the latter is trained on. Raises RecordFormatError for others."""
        if not self.is_record(row):
            fields = row if isinstance(row, dict) else {}
            names = " and ".join(repr(name) for name in (PROMPT_FIELD, COMPLETION_FIELD) if name not in fields)
            raise RecordFormatError(f"is not a pair: {{}} has no field {names}", _suggest_format(row))
        prompt, completion = (row[name] for name in (PROMPT_FIELD, COMPLETION_FIELD))
        if isinstance(prompt, list) and isinstance(completion, list):
            if self.template is None:
                problem = "has lists of messages in {}, and the tokenizer has no chat template to render them"
                raise RecordFormatError(problem, "set data.chat_template")
            before = _read_messages(prompt, needs_answer=False)
            return _render_completion(self.template, before, _read_messages(completion), row)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise RecordFormatError(
                "has fields in {} that are not two texts or two lists of messages", "correct this record"
            )
        text = _join_texts(prompt, completion, "completion")
        return replace(text, weights=_trained_weights([_read_weight(row, "a weight")]))


@dataclass(frozen=True)
class PreferenceFormat:
    """Pairs of a chosen and a rejected answer: texts, or lists of messages, if there is a template.

    The field `prompt` has what comes before both, as text or messages. Without it, `chosen` and `rejected` are whole
    texts or conversations, whose common beginning is the prompt."""

    template: ChatTemplate | None = None
    kind: RecordKind = "preference"
    key: str = ANSWER_FIELDS[0]

    def columns(self, available: Sequence[str]) -> list[str]:
        """Return the columns of prompts, answers and tools."""
        if not set(ANSWER_FIELDS) <= set(available):
            return []
        return [name for name in (PROMPT_FIELD, *ANSWER_FIELDS) if name in available] + _optional_columns(available)

    def is_record(self, row: Any) -> bool:
        """Return whether a value is an object with two answers."""
        return isinstance(row, dict) and all(name in row for name in ANSWER_FIELDS)

    def read(self, row: Any) -> RecordText:
        """Return the texts with either answer, the chosen one first. Raises RecordFormatError for others."""
        if not self.is_record(row):
            raise RecordFormatError("is not a pair: {} has no fields 'chosen' and 'rejected'", _suggest_format(row))
        prompt, chosen, rejected = (row.get(name) for name in (PROMPT_FIELD, *ANSWER_FIELDS))
        if chosen == rejected:
            raise RecordFormatError("has equal answers 'chosen' and 'rejected' in {}", "correct or remove this record")
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
            if prompt is None:
                prompt = common_beginning(chosen, rejected)
                chosen, rejected = (answer.removeprefix(prompt) for answer in (chosen, rejected))
            texts = [_join_texts(prompt, answer, "answer") for answer in (chosen, rejected)]
        else:
            texts = [self._render(*messages, row) for messages in _split_conversations(prompt, chosen, rejected)]
        if _read_weight(row, "a weight") != 1 or any(text.weights for text in texts):
            problem = "has a weight other than 1 in {}, which pairs of answers do not have"
            raise RecordFormatError(problem, "remove the weights, or leave out pairs")
        return replace(texts[0], rejected=texts[1])

    def _render(self, prompt: list[Message], answer: list[Message], row: dict[str, Any]) -> RecordText:
        if self.template is None:
            problem = "has lists of messages in {}, and the tokenizer has no chat template to render them"
            raise RecordFormatError(problem, "set data.chat_template")
        return _render_completion(self.template, prompt, answer, row)


def _optional_columns(available: Sequence[str]) -> list[str]:
    return [name for name in (TOOLS_FIELD, WEIGHT_FIELD) if name in available]


def _join_texts(prompt: str, answer: str, name: str) -> RecordText:
    """Return a prompt with its answer, which is not empty."""
    if not answer:
        raise RecordFormatError(f"has an empty {name} in {{}}", "correct or remove this record")
    return RecordText(prompt + answer, ((len(prompt), len(prompt) + len(answer)),))


def _split_conversations(prompt: Any, chosen: Any, rejected: Any) -> list[tuple[list[Message], list[Message]]]:
    """Return the messages of the prompt and of the answer, for both answers.

    A text in place of messages is the only message of the user or the assistant."""
    answers = [[{"role": ASSISTANT, "content": each}] if isinstance(each, str) else each for each in (chosen, rejected)]
    first, second = (_read_messages(answer) for answer in answers)
    if isinstance(prompt, list):
        before = _read_messages(prompt, needs_answer=False)
        # Some data sets repeat the prompt.
        if first[: len(before)] == before == second[: len(before)]:
            first, second = first[len(before) :], second[len(before) :]
        return [(before, first), (before, second)]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if not common and isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
        return [(before, first), (before, second)]
    if common in (len(first), len(second)):
        problem = "has conversations in {} of which one is the beginning of the other"
        raise RecordFormatError(problem, "correct or remove this record")
    return [(messages[:common], messages[common:]) for messages in (first, second)]


def _render_completion(
    template: ChatTemplate, prompt: list[Message], completion: list[Message], row: dict[str, Any]
) -> RecordText:
    """Render both parts of a record, with the answers of the completion only."""
    if not any(message["role"] == ASSISTANT for message in completion):
        raise RecordFormatError("has a completion in {} without a message of the assistant", "correct this record")
    # Its answers are not trained on, whatever their weights.
    prompt = [{**message, WEIGHT_FIELD: 1} for message in prompt]
    rendered = _render(template, [*prompt, *completion], row)
    # A template may have several answers for a message, or none.
    length = len(common_beginning(rendered.text, template.render(prompt, _read_tools(row.get(TOOLS_FIELD)))))
    answers = tuple(span for span in rendered.answers or () if span[0] >= length)
    if not answers:
        raise RecordFormatError("has a completion in {} that the chat template does not render", "use another template")
    weights = None if rendered.weights is None else _trained_weights(rendered.weights[-len(answers) :])
    return replace(rendered, answers=answers, weights=weights)


def _render(template: ChatTemplate, messages: list[Message], row: dict[str, Any]) -> RecordText:
    """Render the messages of a record with its tools and its weight."""
    _check_roles(messages, template)
    try:
        text, spans = template.render_answers(messages, _read_tools(row.get(TOOLS_FIELD)))
    except ConversationError as error:
        raise RecordFormatError(f"has a conversation in {{}} that {error}", error.fix) from None
    of_record = _read_weight(row, "a weight")
    of_messages = [message.get(WEIGHT_FIELD, 1) for message in messages if message["role"] == ASSISTANT]
    if all(weight == 1 for weight in of_messages):
        return RecordText(text, tuple(spans), _trained_weights([of_record] * len(spans)), is_rendered=True)
    if len(of_messages) != len(spans):
        problem = "has answers in {} with a weight, which the chat template does not keep apart"
        raise RecordFormatError(problem, "remove the weights, or use another template")
    answers = tuple(span for span, weight in zip(spans, of_messages, strict=True) if weight)
    return RecordText(text, answers, _trained_weights([of_record * w for w in of_messages if w]), is_rendered=True)


def _read_weight(holder: Mapping[str, Any], name: str) -> float:
    """Return the weight of a record or a message, which `name` describes. Raises RecordFormatError if it has none."""
    weight = holder.get(WEIGHT_FIELD)
    if weight is None:
        return 1
    if isinstance(weight, int | float) and 0 <= weight <= MAX_WEIGHT:
        return weight
    if isinstance(weight, int | float) and weight > 0:
        raise _weight_error(f"has {name} {weight!r} in {{}}")
    raise RecordFormatError(f"has {name} {weight!r} in {{}}", f"write a number from 0 to {MAX_WEIGHT}")


def _trained_weights(weights: Sequence[float]) -> tuple[float, ...] | None:
    """Return the weights of answers, rounded to those of token files; None if all are 1."""
    if not all(weights):
        raise RecordFormatError("has answers with the weight 0 only in {}: nothing to train on", "remove it")
    if max(weights) > MAX_WEIGHT:
        raise _weight_error(f"has weights in {{}} whose product is {max(weights):g}")
    rounded = tuple(max(round(weight * WEIGHT_STEPS), 1) / WEIGHT_STEPS for weight in weights)
    return rounded if any(weight != 1 for weight in rounded) else None


def _weight_error(problem: str) -> RecordFormatError:
    fix = "divide all weights by the same number: only their ratios count, but for the balance of experts"
    return RecordFormatError(f"{problem}, which is more than {MAX_WEIGHT}", fix)


def _read_messages(value: Any, needs_answer: bool = True) -> list[Message]:
    """Return messages with role and content. Raises RecordFormatError if a value is not a conversation.

    Unless `needs_answer`, the assistant may have none of them."""
    fix = "write a list of objects with role and content, or with from and value"
    if not isinstance(value, list) or not value:
        raise RecordFormatError("has no messages in {}", fix)
    messages: list[Message] = []
    for number, entry in enumerate(value, 1):
        if not isinstance(entry, dict):
            raise RecordFormatError(f"has a message {number} in {{}} that is not an object", fix)
        # Tables have null in place of fields that a message does not have.
        message = {name: part for name, part in entry.items() if part is not None}
        if "from" in message and "role" not in message:
            role = message.pop("from")
            message = {"role": ROLES.get(role, role), "content": message.pop("value", None), **message}
        if not isinstance(message.get("role"), str):
            raise RecordFormatError(f"has a message {number} in {{}} without a role", fix)
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise RecordFormatError(f"has a message {number} in {{}} without content", fix)
        if message["role"] == ASSISTANT:
            _read_weight(message, f"a message {number} with the weight")
        messages.append(message)
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if needs_answer and answers and not any(message.get(WEIGHT_FIELD, 1) for message in answers):
        raise RecordFormatError("has answers with the weight 0 only in {}: nothing to train on", "remove it")
    if needs_answer and not answers:
        raise RecordFormatError("has no message of the assistant in {}, so there is nothing to train on", "remove it")
    return messages


def _check_roles(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Raise RecordFormatError for a role that is neither a usual one nor named by the template."""
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in USUAL_ROLES and role not in template.source:
            fix = did_you_mean(role, list(USUAL_ROLES), f"use one of {', '.join(USUAL_ROLES)}")
            raise RecordFormatError(f"has the role {role!r} in message {number} of {{}}", fix)


def _read_tools(value: Any) -> Sequence[Any] | None:
    """Return the tools of a conversation: a list, or JSON text of one."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except ValueError:
            raise RecordFormatError("has tools in {} that are not valid JSON", "correct this record") from None
    return value or None


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _suggest_format(row: Any) -> str:
    """Return the fix for a record that is not of its format."""
    if isinstance(row, dict):
        known = (*CONVERSATION_FIELDS, PROMPT_FIELD, *ANSWER_FIELDS)
        lists = [name for name, value in row.items() if isinstance(value, list) and any(map(_is_object, value))]
        if lists and not any(name in row for name in known):
            return f"if {lists[0]!r} has the messages, set data.text_key = {json.dumps(lists[0])}"
        formats = (
            ("preference", ANSWER_FIELDS),
            ("chat", CONVERSATION_FIELDS),
            ("prompt", (COMPLETION_FIELD,)),
            ("text", (TEXT_KEY,)),
        )
        for kind, fields in formats:
            if any(name in row for name in fields):
                return f'set data.format = "{kind}", which its fields suggest'
    return "correct or remove this record"
