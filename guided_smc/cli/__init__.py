"""The command line, `guided-smc`. Nothing heavy is imported before a command needs it."""

from guided_smc.cli.main import main

__all__ = ["main"]
