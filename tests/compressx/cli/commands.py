"""How the tests of the command line run it."""

from __future__ import annotations

from click.testing import CliRunner, Result

from compressx.cli import cli


def invoke(*arguments: str) -> Result:
    """Run a command in this process, which is faster; an exception that is no exit is raised."""
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def printed(*arguments: str) -> str:
    """Run a command that ends well; returns what it prints."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str) -> str:
    """Run a command that is wrong; returns the one message that it ends with."""
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr
