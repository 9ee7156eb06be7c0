"""How the tests of the command line run it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from compressx.cli import cli


def invoke(*arguments: str) -> Result:
    """Run a command in this process, which is faster; an exception that is no exit is raised."""
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
