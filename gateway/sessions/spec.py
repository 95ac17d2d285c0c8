"""What a session is created with."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from titogym.errors import UserError
from titogym.gateway.errors import RequestError
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.policies import policy


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError(f"must be a number, not {value!r}"[:80])
    return value


_NUMBER = BeforeValidator(_number)
Share = Annotated[float, _NUMBER, Field(ge=0, le=1)]
Penalty = Annotated[float, _NUMBER, Field(ge=-2, le=2)]
Whole = Annotated[int, _NUMBER, Field(ge=-(1 << 63), lt=1 << 63)]  # as much as every JSON writer takes
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, _NUMBER, Field(ge=1, lt=1 << 63)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Sampling(_Strict):
    """Sampling options, each None where nobody asked for one. `max_tokens` bounds one answer."""

    temperature: Annotated[float, _NUMBER, Field(ge=0)] | None = None
    top_p: Annotated[float, _NUMBER, Field(gt=0, le=1)] | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    max_tokens: Count | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=16)] | None = None
    seed: Whole | None = None
    json_schema: str | None = None
    ignore_eos: bool | None = None


class Limits(_Strict):
    """Budgets of the whole session; a turn that was sampled again counts once."""

    turns: Count | None = None
    tokens: Count | None = None  # sampled tokens


class SessionSpec(_Strict):
    """`sampling` is forced on every turn, whatever the client asks."""

    matcher: str = "strict"
    policy: str = "linear"
    family: str | None = None  # must be the gateway's own where it is given
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    labels: dict[str, Any] = {}
    routes: bool = False  # keep the expert routes of every token
    ttl_seconds: Annotated[float, _NUMBER, Field(gt=0)] | None = (
        None  # since its last use; None: the gateway's default
    )

    @field_validator("matcher")
    @classmethod
    def _known_matcher(cls, name: str) -> str:
        try:
            matcher(name)
        except UserError as error:
            raise ValueError(str(error)) from None
        return name

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        try:
            policy(name)
        except UserError as error:
            raise ValueError(str(error)) from None
        return name


def parse_spec(body: Any) -> SessionSpec:
    """Raises `RequestError` that names the key at fault."""
    if not isinstance(body, dict):
        raise RequestError("The request body must be a JSON object.")
    try:
        return SessionSpec.model_validate(body)
    except ValidationError as error:
        key, message = fault(error)
        raise RequestError(f"{key}: {message}", param=key) from None


def fault(error: ValidationError) -> tuple[str, str]:
    """The key that is at fault first, dotted, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")  # raised by a validator of ours
    message = str(own) if own is not None else first["msg"].replace("valid tuple", "list")
    return ".".join(map(str, first["loc"])), message
