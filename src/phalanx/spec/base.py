"""Base class of all descriptions: frozen, strict, and with errors that name the fix."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from phalanx.spec.errors import UserError, UserErrorGroup
from phalanx.spec.formatting import number_fix
from phalanx.spec.local_paths import check_local_path, check_store, check_text_source

S = TypeVar("S", bound="Spec")
LocalPath = Annotated[str, AfterValidator(partial(check_local_path, ""))]
"""Type of a field with the path of a file or directory on this machine."""
TextSource = Annotated[str, AfterValidator(partial(check_text_source, ""))]
"""Type of a field with a local path, a URL, or `hf:` and the name of a Hugging Face dataset."""
StoreFolder = Annotated[str, AfterValidator(partial(check_store, ""))]
"""Type of a field with the URL of a folder in an object store."""
FIELD_ALIASES = {
    "lr": "learning_rate",
    "warmup": "warmup_steps",
    "batch": "tokens_per_step",
    "sequence": "seq_len",
    "context_length": "seq_len",
    "clip": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "wd": "weight_decay",
    "parallel": "layout",
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "expert": "ep",
    "zero": "data_parallel",
    "price_per_hour": "price_per_device_hour",
    "price_per_gpu_hour": "price_per_device_hour",
}
"""Names that users or earlier versions use, by the prefix of their words, and the fields they mean."""


class Spec(BaseModel):
    """A frozen, strictly typed table of a run file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed; unset fields remain unset.

        Values may be tables and lists, as in files. Pydantic's `model_copy(update=...)` checks nothing: it is for the
        loops of the planner, which compute many values and check layouts themselves. Raises UserErrorGroup if some
        fields are wrong.
        """
        try:
            copy = self.model_validate({**self.__dict__, **changes})
        except ValidationError:
            return parse_table(type(self), {**self.model_dump(mode="json", exclude_unset=True), **changes})
        copy.model_fields_set.intersection_update(self.model_fields_set | changes.keys())
        return copy


def parse_table(spec_class: type[S], table: dict[str, Any], path_prefix: str = "") -> S:
    """Validate a table into a description.

    `path_prefix`, the path of the table in its file, precedes the field names of errors. Raises UserErrorGroup if some
    fields are wrong. The message names every field, its value and the allowed values.
    """
    try:
        # JSON mode is strict about types but accepts a list for a tuple, which is what TOML provides.
        return spec_class.model_validate_json(json.dumps(table, default=_to_json_value))
    except ValidationError as error:
        items = _drop_errors_of_other_types([dict(item) for item in error.errors()])
        raise UserErrorGroup([_validation_error(spec_class, table, path_prefix, item) for item in items]) from None


def _to_json_value(value: object) -> object:
    return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, Spec) else str(value)


PYDANTIC_INNER_PREFIXES = "function-", "constrained-", "literal[", "tuple["
"""Prefixes of the location parts that pydantic adds inside a field."""


def _drop_errors_of_other_types(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop errors about the type that the user did not write, where a field may be a single value or a list."""
    paths = [tuple(_field_path(item)) for item in items]

    def is_of_other_type(item: dict[str, Any], path: tuple[str, ...]) -> bool:
        if isinstance(item["input"], list | dict):
            return any(len(other_path) > len(path) and other_path[: len(path)] == path for other_path in paths)
        return item["type"] == "tuple_type" and paths.count(path) > 1

    return [item for item, path in zip(items, paths, strict=True) if not is_of_other_type(item, path)]


def _field_path(item: dict[str, Any]) -> list[str]:
    parts = map(str, item["loc"])
    # Of a table of one of several types, pydantic names the class.
    return [part for part in parts if not (part.startswith(PYDANTIC_INNER_PREFIXES) or part[:1].isupper())]


def _dotted_name(parts: Sequence[str]) -> str:
    """Return the name of a field from the non-empty parts of its path: data.train[0]."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(filter(None, parts)))


def _validation_error(
    spec_class: type[Spec], table: dict[str, Any], path_prefix: str, item: dict[str, Any]
) -> UserError:
    path = _field_path(item)
    field = _dotted_name([path_prefix, *path]) or spec_class.__name__
    context = item.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, UserError):
        name = _dotted_name([path_prefix, *path, cause.field])  # a validator of one field leaves its name to us
        return UserError(name, cause.value, cause.problem, cause.fix)
    value = None if item["type"] == "missing" or isinstance(item["input"], dict) else item["input"]
    if item["type"] == "extra_forbidden":
        return UserError(
            field, value, "is not a known field", fix=did_you_mean(path[-1], known_fields(spec_class, path[:-1]))
        )
    problem = item["msg"][0].lower() + item["msg"][1:]
    problem = problem.replace("input should be", "must be").replace("field required", "is missing")
    problem = problem.replace("an object", "a table").replace("a valid array", "a list")
    problem = re.sub(r"^\w+ should have", "must have", problem)
    problem = problem if problem.startswith(("must ", "is ")) else f"is invalid: {problem}"
    return UserError(field, value, problem, fix=_suggest_fix(item["type"], field, value, context))


def _suggest_fix(error_type: str, field: str, value: object, context: dict[str, Any]) -> str:
    """Return the fix for a pydantic error of a given type in a field, which is named with its tables."""
    name = field.rpartition(".")[2]
    header = re.sub(r"(.*)\[\d+\]$", r"[\1]", field)  # an entry of a list has two brackets: [[data.source]]
    table_fix = f"write a table: [{header}], with its keys in the lines below"
    if error_type == "literal_error":
        return did_you_mean(
            str(value), re.findall(r"'([^']*)'", context["expected"]), fallback="use one of these values"
        )
    return {
        "missing": f"set {name}",
        "int_type": number_fix(f"{name} =", value) or f"write a whole number, such as {name} = 4",
        "float_type": number_fix(f"{name} =", value) or f"write a number, such as {name} = 0.1",
        "string_type": f'write text in quotes, such as {name} = "..."',
        "bool_type": f"write {name} = true or {name} = false",
        "list_type": f"write a list in brackets: {name} = [{json.dumps(value, default=str)}]",
        "tuple_type": f"write a list in brackets: {name} = [..., ...]",
        "model_type": table_fix,
        "model_attributes_type": table_fix,
        "greater_than": f"increase {name}",
        "greater_than_equal": f"increase {name}",
        "less_than": f"decrease {name}",
        "less_than_equal": f"decrease {name}",
        "too_long": "remove some entries",
        "finite_number": "write a finite number",
        "string_pattern_mismatch": "use letters, digits, dots, dashes and underscores",
    }.get(error_type, "")


def known_fields(spec_class: type[Spec], path: list[str]) -> list[str]:
    """Return the field names of the table at `path` inside a description."""
    for part in (part for part in path if not part.isdigit()):
        annotation = spec_class.model_fields[part].annotation if part in spec_class.model_fields else None
        nested = [t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Spec)]
        if not nested:
            return []
        spec_class = nested[0]
    return [name for name, info in spec_class.model_fields.items() if not info.exclude]


def did_you_mean(word: str, known: list[str], fallback: str = "") -> str:
    """Return a sentence that suggests the nearest known word.

    Letter case and suffixes after a dash are ignored. If no word is near, the result is `fallback`, or a list of all
    known words.
    """
    query = word.lower()
    matches = sorted((name for name in known if f"{query}-".startswith(f"{name.lower()}-")), key=len)[-1:]
    matches = matches or [name for name in known if name.lower().startswith(f"{query}-")]
    matches = matches or [field for alias, field in FIELD_ALIASES.items() if alias == query and field in known]
    matches = matches or difflib.get_close_matches(query, known, n=1, cutoff=0.8)
    meant = (field for alias, field in FIELD_ALIASES.items() if query.startswith(alias) and field in known)
    matches = matches or list(meant)[:1]
    suggestion = " or ".join(map(repr, matches))
    return f"did you mean {suggestion}?" if matches else fallback or "use one of: " + ", ".join(sorted(known))


def require(ok: bool, field: str, value: object, problem: str, fix: str = "") -> None:
    """Raise UserError unless a condition holds.

    Inside a validator, `field` is relative to the table being validated. `problem` is a predicate, such as "is below
    1".
    """
    if not ok:
        raise UserError(field, value, problem, fix)


def refuse_together(table: str, settings: Iterable[tuple[str, bool, str, str]]) -> None:
    """Raise UserError for the first setting that cannot be combined with a table of a run file.

    A setting is its field, whether it is set, the reason as a predicate, such as "replaces the same loss", and the fix.
    """
    for field, is_set, why, fix in settings:
        if is_set:
            raise UserError(field, None, f"cannot be combined with [{table}]: it {why}", fix)


def walk_fields(table: Spec, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path, the value and the default of each field of a table, and of the tables in it."""
    for name, info in type(table).model_fields.items():
        if info.exclude:
            continue
        value = getattr(table, name)
        yield f"{prefix}{name}", value, info.default
        if isinstance(value, Spec):
            yield from walk_fields(value, f"{prefix}{name}.")


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order.

    Error messages suggest these in place of a number that does not divide.
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
