"""Parses a JSON object into the pydantic model of its endpoint, in small steps.

pydantic validates in C, holds the interpreter lock throughout and collects every error of every item: a list of
thousands, each tried as one of 25 types, would stall all streams for minutes.  The models here are vLLM's, except that
Python code runs between the items of a long list, so that other threads can run, and that no item is validated after
the first invalid one.  The size of values that pydantic validates without interruption is limited beforehand.
"""

import functools
import types
from collections.abc import Callable
from itertools import chain, islice
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, PrivateAttr, TypeAdapter, WrapValidator, create_model
from pydantic_core import PydanticCustomError, ValidationError
from pydantic_core.core_schema import ValidationInfo, ValidatorFunctionWrapHandler

from melld.api.answers import bad
from melld.nested import containers

MAX_INNER_VALUES = 512
"""Maximum objects and lists in one message or similar entry, which is validated without interruption."""
MAX_ACTIONS = 64
"""The same for a computer-use call, each of whose actions is tried as nine types."""
SMALL = 1000
"""Maximum entries of any list that is validated without interruption."""
MANY_TEXTS = 10_000
"""The same for plain texts and lists of tokens."""
TEXTS = ("query", "queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "texts", "images", "inputs")
"""The fields for texts that are compared, or embedded in Cohere's format."""
MAX_TRIED_OBJECTS = 256
NOT_LOOKED_AT = "not_looked_at"
_BY_ITEM = ("messages", "input", "tools")
_OF_TOKENS = frozenset({"prompt", "input", "tokens", "stop_token_ids", "allowed_token_ids", "logprob_token_ids"})
_OF_TEXTS = ("prompt", "input")
_OF_ARGUMENTS = ("vllm_xargs", "chat_template_kwargs", "logit_bias")


def patient(model: type[BaseModel]) -> Callable[[dict[str, Any]], BaseModel]:
    """Return a function that parses a body into (a subclass of) the model, to be called in a thread.

    The function raises ValidationError or vLLM's errors if the body does not fit the model, and `Refusal` if a part
    is too large to be validated in one go.
    """
    fields: dict[str, Any] = {}
    for name in _BY_ITEM & model.model_fields.keys():
        annotation: Any = model.model_fields[name].annotation
        fields[name] = (_by_item(annotation), model.model_fields[name])
    made: type[BaseModel] = create_model(model.__name__, __base__=model, **fields)
    for name, attribute in made.__private_attributes__.items():
        if attribute.default_factory is None:  # a constant of vLLM's, which pydantic would copy for each request
            constant = functools.partial(getattr, attribute, "default")
            made.__private_attributes__[name] = PrivateAttr(default_factory=constant)
    for kind in made.__mro__:
        for name in [name for name, field in model.model_fields.items() if field.deprecated and name in vars(kind)]:
            delattr(kind, name)  # it warns vLLM of its own field whenever that is read

    never_null = _never_null(model)

    def parse(body: dict[str, Any]) -> BaseModel:
        check_bites(body)
        return made.model_validate(_without_nulls(body, never_null), context={})

    return parse


def trying(kind: Any, plain: Any = None) -> Callable[[dict[str, Any]], BaseModel]:
    """Return a function that parses a body by trying each model in turn, and raises as `patient`'s does.

    `plain`: the one model to try where neither `messages` nor `input` holds objects.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    adapter_of_plain: TypeAdapter[Any] = adapter if plain is None else TypeAdapter(plain)
    never_null = _never_null(kind)

    def parse(body: dict[str, Any]) -> BaseModel:
        check_bites(body)
        for name in ("messages", "input", *TEXTS):
            _check_tried(body.get(name), name)
        tried = adapter if "messages" in body or _begins_with_object(body.get("input")) else adapter_of_plain
        parsed: BaseModel = tried.validate_python(_without_nulls(body, never_null))
        return parsed

    return parse


def _never_null(kind: Any) -> frozenset[str]:
    """Return the names of the optional fields that must not be null, of a model or a union of models."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        return frozenset(
            name for name, one in fields if not one.is_required() and types.NoneType not in get_args(one.annotation)
        )
    return frozenset[str]().union(*map(_never_null, get_args(kind)))


def _without_nulls(body: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the body without those of its fields that are null: clients mean the default, as OpenAI's API does."""
    return {name: value for name, value in body.items() if value is not None or name not in names}


def _check_tried(value: Any, name: str) -> None:
    """Refuse values that would take long to validate with several models."""
    values = value if isinstance(value, list) else []
    if len(values) > MAX_TRIED_OBJECTS and any(isinstance(one, dict) for one in values):
        raise bad(name, f"{name} may hold at most {MAX_TRIED_OBJECTS} objects")
    if _holds_more_than(value, 4 * MAX_TRIED_OBJECTS) and not all(map(_is_list_of_tokens, values)):
        raise bad(name, f"{name} may hold at most {4 * MAX_TRIED_OBJECTS} objects and lists")


def _begins_with_object(value: Any) -> bool:
    """Return True for messages, and for lists of messages."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, dict)


def check_bites(body: dict[str, Any]) -> None:
    """Refuse values that pydantic would block on for long.

    Raises:
        Refusal: 400, with the field as `param`.
    """
    for name, value in body.items():
        if name in _OF_TOKENS and isinstance(value, list):
            _check_tokens(value, name)
        elif name in _OF_ARGUMENTS and isinstance(value, dict):
            _check_arguments(value, name)
        elif name == "structured_outputs" and isinstance(value, dict):
            _check_choices(value.get("choice"), name)
        elif isinstance(value, list) and name not in _BY_ITEM and len(value) > SMALL:
            most = MANY_TEXTS if name in TEXTS and _are_words(value) else SMALL
            if len(value) > most:
                raise bad(name, f"{name} may hold at most {most} entries")


@functools.cache
def _by_item(annotation: Any) -> Any:
    """Return the type with a validator around every item of its lists."""
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        return list[Annotated[item, WrapValidator(_look_at)]]  # type: ignore[valid-type]
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(_by_item(one) for one in get_args(annotation))]  # noqa: UP007 - made of values
    return annotation


def _look_at(item: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate one item, unless an earlier one was invalid."""
    assert info.context is not None
    if info.context.get("wrong"):
        raise PydanticCustomError(NOT_LOOKED_AT, "not checked: an earlier entry is invalid")
    most = MAX_ACTIONS if isinstance(item, dict) and "actions" in item else MAX_INNER_VALUES
    if _holds_more_than(item, most):
        raise bad(info.field_name or "body", f"an entry may hold at most {most} objects and lists")
    try:
        return validate(item)
    except ValidationError:
        info.context["wrong"] = True
        raise


def _holds_more_than(root: Any, most: int) -> bool:
    """Return True if it holds more than `most` objects and lists, except schemas, which are not validated here."""
    found = containers(root, besides=("parameters", "input_schema"))
    return sum(1 for _ in islice(found, most + 1)) > most


def _check_tokens(values: list[Any], name: str) -> None:
    """Refuse a long list that is not of tokens or lists of tokens; messages are validated item by item."""
    if values and isinstance(values[0], dict):
        if len(values) > SMALL and name != "input":
            raise bad(name, f"{name} must be a list of objects")
        return
    if values and isinstance(values[0], list) and len(values) <= MANY_TEXTS:
        inner = [one for one in values if isinstance(one, list)]
        if sum(map(len, inner)) > SMALL and not all(map(_are_tokens, inner)):
            raise bad(name, f"{name} must contain only lists of tokens")
    elif len(values) > SMALL and not _are_tokens(values):
        if not _are_words(values) or name not in _OF_TEXTS:
            raise bad(name, f"{name} with more than {SMALL} entries must be a list of tokens")
        if len(values) > MANY_TEXTS:
            raise bad(name, f"one call takes at most {MANY_TEXTS} texts, not {len(values)}")


def _are_tokens(values: list[Any]) -> bool:
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**63)


def _is_list_of_tokens(value: Any) -> bool:
    return isinstance(value, list) and _are_tokens(value)


def _are_words(values: list[Any]) -> bool:
    return set(map(type, values)) == {str}


def _check_arguments(values: dict[str, Any], name: str) -> None:
    inner = sum(len(one) for one in values.values() if isinstance(one, list | dict))
    if name == "logit_bias":
        digits = all(key.isdecimal() for key in chain(values) if isinstance(key, str))
        if len(values) > SMALL and not (digits and set(map(type, values.values())) <= {int, float}):
            raise bad(name, f"{name} with more than {SMALL} entries must have one number per token")
    elif len(values) + inner > SMALL:
        raise bad(name, f"{name} may hold at most {SMALL} values")


def _check_choices(choices: Any, name: str) -> None:
    if isinstance(choices, list) and len(choices) > SMALL and not _are_words(choices):
        raise bad(name, f"a choice of more than {SMALL} must be a list of texts")
