"""`guided-smc serve`: the HTTP server. Its flags are the server's settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from guided_smc.cli.common import SETTINGS, debug_option
from guided_smc.errors import OptionError

FLAGS: tuple[tuple[str, Any, str], ...] = (
    ("draft", str, "Proposes tokens: a smaller model with the same tokenizer, int8, or ngram."),
    ("dtype", str, "float32, bfloat16, float16 or auto."),
    ("device", str, "cpu, cuda, cuda:1, ..."),
    ("served-name", str, "What clients call the model.  [default: its name]"),
    ("host", str, "Address to listen at.  [default: 127.0.0.1]"),
    ("port", int, "Port; 0 takes a free one.  [default: 8000]"),
    ("max-body-bytes", int, "Of a request's body.  [default: 4000000]"),
    ("log-level", click.Choice(["debug", "info", "warning", "error"]), "[default: info]"),
    ("max-rows", int, "Most particles in one batch.  [default: 64]"),
    ("max-total-tokens", int, "Most tokens whose K/V is held at once.  [default: 65536]"),
    ("max-queue", int, "Most answers that wait; beyond it is 429.  [default: 128]"),
    ("deadline", float, "Seconds that a request may take.  [default: 300]"),
    ("grace", float, "Seconds for what runs when asked to stop.  [default: 30]"),
    ("send-timeout", float, "Seconds until a client that does not read is cut.  [default: 20]"),
    ("receive-timeout", float, "Seconds that a client may pause in a body.  [default: 20]"),
    ("n-particles", int, "Where a request does not say.  [default: 8]"),
    ("max-particles", int, "Most particles of one answer.  [default: 32]"),
    ("max-tokens", int, "Where a request does not say.  [default: 256]"),
    ("max-choices", int, "Largest n of a request.  [default: 16]"),
    ("max-schema-bytes", int, "Of a schema, pattern or grammar.  [default: 200000]"),
    ("max-schema-seconds", float, "To compile one.  [default: 5]"),
    ("max-schema-memory", int, "Bytes to compile one, on Linux.  [default: 1 GiB]"),
    ("cached-schemas", int, "Compiled ones that are kept.  [default: 256]"),
)
"""Name, type and help of the flags that are settings of the same name."""


def _flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, said in reversed(FLAGS):
        command = click.option(f"--{name}", type=kind, default=None, help=said)(command)
    return command


@click.command(context_settings=SETTINGS, short_help="Serve a model over HTTP, as OpenAI does.")
@click.argument("model", required=False)
@_flags
@click.option("--api-key", multiple=True, help="Clients must send one of these. Repeatable.")
@click.option(
    "--reward",
    multiple=True,
    metavar="NAME=REWARD",
    help="A reward that clients may name: a spec, such as brief=length:60, or a YAML or TOML file "
    "of rewards. Repeatable.",
)
@click.option("--config", type=click.Path(dir_okay=False), help="TOML file of settings.")
@debug_option
def serve(model: str | None, config: str | None, **given: Any) -> int:
    """Serve MODEL (default: smollm2-135m) to OpenAI's clients, at /v1.

    Every option is also a variable, such as GUIDED_SMC_MAX_ROWS, and a key of the TOML file that
    --config or GUIDED_SMC_CONFIG names, such as max_rows. Options go before variables, and these
    before the file. A key is better put into GUIDED_SMC_API_KEYS (between commas) than into an
    option, which others on the machine can see.

    SIGTERM and Ctrl-C stop it: what runs has --grace seconds to finish.

    \b
    Examples:
      guided-smc serve smollm2-135m
      guided-smc serve Qwen/Qwen2.5-1.5B-Instruct --draft int8 --port 8080
      guided-smc serve --reward brief=length:60 --n-particles 4

    \b
    Exit codes:
      0    it was asked to stop, and did
      1    an internal error
      2    wrong usage or set-up (settings, the model, a port that is taken): it never listened
      130  Ctrl-C, 143 SIGTERM, before it listened
    """  # noqa: D301 (click's mark is the character, not its escape)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import pydantic_settings  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"the server needs the package {error.name!r}: pip install 'guided-smc[server]'"
        ) from None
    from guided_smc.server.serving import serve as run
    from guided_smc.server.settings import read_settings

    flags: dict[str, Any] = {"model": model, **given}
    keys, rewards = flags.pop("api_key"), flags.pop("reward")
    if keys:
        flags["api_keys"] = list(keys)
    if rewards:
        flags["rewards"] = dict(_named(reward) for reward in rewards)
    run(read_settings(config, **flags))
    return 0


def _named(reward: str) -> tuple[str, str]:
    name, equals, spec = reward.partition("=")
    if not equals or not name.strip() or not spec.strip():
        raise click.UsageError(f"--reward is NAME=REWARD, such as brief=length:60, got {reward!r}")
    return name.strip(), spec.strip()
