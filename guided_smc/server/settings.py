"""What an operator can set: by flags, else environment variables, else a TOML file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from guided_smc.errors import OptionError
from guided_smc.models.budget import PAGE, Budget, Need

PREFIX = "GUIDED_SMC_"


class Settings(BaseSettings):
    """Settings of the server; each is a flag, a variable `GUIDED_SMC_NAME`, and a key in TOML."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    model: str = Field("smollm2-135m", description="Name, folder or file of the model.")
    draft: str | None = Field(
        None, description="Proposes tokens: a smaller model with the same tokenizer, int8, ngram."
    )
    dtype: str | None = Field(None, description="float32, bfloat16, float16 or auto.")
    device: str | None = Field(None, description="cpu, cuda, cuda:1, ...")
    served_name: str | None = Field(
        None, description="What clients call the model.  [default: its name]"
    )

    host: str = Field("127.0.0.1", description="Address to listen at.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    api_keys: Annotated[list[SecretStr], NoDecode] = Field(
        [], description="Keys of which a client must send one as a bearer token; none: no key."
    )
    max_body_bytes: int = Field(4_000_000, gt=0, description="Of a request's body.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines that are written."
    )

    max_rows: int = Field(64, gt=0, description="Most particles in one batch.")
    max_total_tokens: int = Field(
        65_536,
        ge=PAGE,
        description="Most tokens of K/V in pages, and again as many in windows.",
    )
    max_queue: int = Field(128, gt=0, description="Most answers that wait; beyond it is 429.")
    deadline: float = Field(300.0, gt=0, description="Seconds that a request may take.")
    grace: float = Field(30.0, ge=0, description="Seconds for what runs when asked to stop.")
    send_timeout: float = Field(
        20.0, gt=0, description="Seconds after which a client that does not read is cut off."
    )
    receive_timeout: float = Field(
        20.0, gt=0, description="Seconds that a client may pause within the body of a request."
    )

    n_particles: int = Field(
        8, gt=0, description="Particles of a request that does not say, where they change anything."
    )
    max_particles: int = Field(32, gt=0, description="Most particles of one answer.")
    max_tokens: int = Field(256, gt=0, description="Tokens of a request that does not say.")
    max_choices: int = Field(16, gt=0, description="Largest n of a request.")

    max_schema_bytes: int = Field(200_000, gt=0, description="Of a schema, pattern or grammar.")
    max_schema_seconds: float = Field(5.0, gt=0, description="To compile one.")
    max_schema_memory: int = Field(1 << 30, gt=0, description="Bytes to compile one (on Linux).")
    cached_schemas: int = Field(256, gt=0, description="Compiled ones that are kept.")

    rewards: dict[str, str] = Field(
        {}, description="Rewards that clients may name: NAME=SPEC, or a YAML or TOML file."
    )

    @field_validator("api_keys", mode="before")
    @classmethod
    def _between_commas(cls, keys: Any) -> Any:
        if isinstance(keys, str):
            keys = [key.strip() for key in keys.split(",")]
        if isinstance(keys, list | tuple) and any(not key for key in keys):
            raise ValueError("an empty key would let everybody in")
        return keys

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if self.n_particles > self.max_particles:
            raise ValueError(
                f"n_particles is {self.n_particles}, more than max_particles={self.max_particles}: "
                "requests that do not say would be refused"
            )
        least = Need.of(1, 1, self.max_tokens)
        if not Budget.of(self.max_total_tokens, "the server").holds([least]):
            raise ValueError(
                f"max_total_tokens is {self.max_total_tokens}, and one particle with "
                f"max_tokens={self.max_tokens} behind a prompt of one token may need "
                f"{least.pages * PAGE}: requests that do not say max_tokens would be refused; "
                "raise max_total_tokens or lower max_tokens"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags before the environment before the file."""
        path = os.environ.get(f"{PREFIX}CONFIG")
        file = TomlConfigSettingsSource(settings_cls, Path(path)) if path else None
        return tuple(s for s in (init_settings, env_settings, file) if s is not None)


def read_settings(config: str | None = None, **flags: Any) -> Settings:
    """The settings of a process.

    Args:
        config: A TOML file, in place of the one that `GUIDED_SMC_CONFIG` names.
        flags: What was given on the command line; None is what was not.

    Raises:
        OptionError: The file cannot be read, or a setting is unknown or out of range.
    """
    before = os.environ.get(f"{PREFIX}CONFIG")
    path = config or before
    where = f"settings of the server (flags, variables {PREFIX}..."
    where += ")" if path is None else f", {path})"
    try:
        if path is not None:
            if not Path(path).is_file():
                raise OptionError(f"there is no configuration file {path}")
            os.environ[f"{PREFIX}CONFIG"] = path
        return Settings(**{k: v for k, v in flags.items() if v is not None})
    except ValidationError as error:
        parts = [_told(e) for e in error.errors(include_input=False, include_url=False)]
        raise OptionError(f"{where}: {'; '.join(parts)}") from None
    except (ValueError, OSError) as error:  # TOML, or JSON in a variable
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{where}: {error}") from None
    finally:
        if config is not None:
            if before is None:
                os.environ.pop(f"{PREFIX}CONFIG", None)
            else:
                os.environ[f"{PREFIX}CONFIG"] = before


def _told(error: Any) -> str:
    """An error of pydantic's in our words."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"there is no setting {name!r} (see `guided-smc serve --help`)"
    said = str(error["msg"]).removeprefix("Value error, ")
    return f"{name}: {said}" if name else said
