"""Chat templates: the text of a conversation, and which part of it the assistant wrote.

A template is a Jinja program of whoever published the tokenizer, so it runs in Jinja's sandbox, as in transformers,
where it can change nothing outside. The variables, filters and the tag {% generation %} are those of transformers'
`apply_chat_template`, so that both render equally."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ASSISTANT = "assistant"
# Noncharacters of Unicode, reserved for use inside a program.
BEGIN = "\ufdd0"
END = "\ufdd1"
BUILT_IN_TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ (message['content'] or '') + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ (message['content'] or '') + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message['role'] | capitalize + ': ' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ (message['content'] or '') + eos_token }}"
        "{% endgeneration %}{% else %}{{ message['content'] or '' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
    ),
}
"""Templates by name, for tokenizers without one. "plain" needs no tokens of its own."""
Message = Mapping[str, Any]
Span = tuple[int, int]
"""First character, and the one after the last."""


class ConversationError(ValueError):
    """A conversation that a template does not render, or whose answers cannot be separated from the rest."""

    def __init__(
        self,
        problem: str,
        fix: str = "correct this conversation, or use a data.chat_template with {% generation %} around answers",
    ) -> None:
        super().__init__(problem)
        self.fix = fix


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the variables of its tokenizer."""

    source: str
    """Jinja text."""
    variables: tuple[tuple[str, str], ...] = ()
    """Special tokens by name, such as `eos_token`."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation, followed by the beginning of an answer with `add_generation_prompt`.

        Raises ConversationError if the template refuses it."""
        return self._render(messages, tools, add_generation_prompt).replace(BEGIN, "").replace(END, "")

    def render_answers(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans that the assistant wrote, each with what ends its turn.

        They are what the template has between {% generation %} and {% endgeneration %}. Of a template without these
        tags, conversations up to each answer are rendered and compared. Raises ConversationError if that is ambiguous.
        """
        given = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if BEGIN in given or END in given:
            raise ConversationError("has one of the characters U+FDD0 and U+FDD1, which mark answers here")
        marked = self._render(messages, tools, add_generation_prompt=False)
        text = marked.replace(BEGIN, "").replace(END, "")
        spans = list(_marked_spans(marked)) if BEGIN in marked else self._compare_turns(messages, tools, text)
        if not spans:
            raise ConversationError("has no turn of the assistant to train on")
        self._check_calls(messages, tools, text)
        return text, spans

    def _check_calls(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> None:
        """Raise ConversationError if a conversation has the same text without the tool calls of a message."""
        for number, message in enumerate(messages):
            if not message.get("tool_calls"):
                continue
            silent = {"content": "", **message, "tool_calls": None}
            try:
                is_dropped = self.render([*messages[:number], silent, *messages[number + 1 :]], tools) == text
            except ConversationError:  # the template needs the calls
                continue
            if is_dropped:
                problem = f"has tool calls in message {number + 1}, which the chat template does not render"
                raise ConversationError(problem, "use a data.chat_template with tools, or remove this conversation")

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, add_generation_prompt: bool) -> str:
        try:
            return _compile(self.source).render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **dict(self.variables)
            )
        # The template may fail in any way on messages that it does not expect.
        except Exception as error:
            raise ConversationError(f"is refused by the chat template: {error}") from None

    def _compare_turns(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> list[Span]:
        """Return the spans of answers as the difference between the conversation before and after each of them."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                start = self._start_of_answer(messages[:number], tools, text)
                after = self.render(messages[: number + 1], tools)
                end = None if start is None else self._end_of_answer(text, after, start, message)
                if start is None or end is None:
                    problem = "has answers that the chat template renders differently in longer conversations"
                    raise ConversationError(f"{problem} (message {number + 1})")
                spans.append((start, end))
        return spans

    def _start_of_answer(self, before: Sequence[Message], tools: Sequence[Any] | None, text: str) -> int | None:
        """Return where the answer to some messages begins in the text of a conversation; None if it is unclear."""
        prompt = self.render(before, tools, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # A generation prompt may begin what a given answer does not have, such as reasoning.
        without_answer = self.render(before, tools)
        start = len(common_beginning(prompt, text))
        return start if start > len(without_answer) and text.startswith(without_answer) else None

    def _end_of_answer(self, text: str, after: str, start: int, message: Message) -> int | None:
        """Return where an answer ends in the text of a conversation, `after` being the conversation up to it.

        None if it is unclear. Of the last answer of a conversation, a template may render more: reasoning before it,
        or the end of the text."""
        calls = message.get("tool_calls")
        words = str(message.get("content") or "").strip()
        for whole in (after, after.removesuffix(dict(self.variables).get("eos_token", ""))):
            rests = (whole[place:] for place in range(start, len(whole)))
            rest = next((rest for rest in rests if text.startswith(rest, start)), "")
            if rest and (words in rest if words else calls):
                return start + len(rest)
        return None


def common_beginning(first: str, second: str) -> str:
    """Return the longest text with which both begin."""
    length = next((place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    return first[:length] if length is not None else min(first, second, key=len)


def _marked_spans(marked: str) -> list[Span]:
    """Return the spans between marks, as positions in the text without marks."""
    spans = []
    length = 0
    for number, part in enumerate(marked.replace(END, BEGIN).split(BEGIN)):
        if number % 2 and part:
            spans.append((length, length + len(part)))
        length += len(part)
    return spans


class Generation(Extension):
    """The tag {% generation %} around what the assistant writes, as in transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Mark the text of the tag's body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    """Return the program of a template. Raises jinja2.TemplateError for a syntax error."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def check_template(source: str) -> str | None:
    """Return what is wrong with the syntax of a template; None if nothing is."""
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        return f"is not a valid Jinja template: {error.message} (line {error.lineno})"
    return None
