"""perdure config: what a config may hold."""

from __future__ import annotations

import json
import sys

import typer

from perdure.methods.registry import config_schema

config = typer.Typer(no_args_is_help=True, help="What a config may hold.")


@config.callback()
def _config() -> None:
    """Show what a config may hold."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of a config, with which editors complete and check YAML files.

    For the YAML extension of VS Code and other users of yaml-language-server: write it to a file
    and begin a config with `# yaml-language-server: $schema=perdure.schema.json`.
    """
    sys.stdout.write(json.dumps(config_schema(), indent=2) + "\n")
