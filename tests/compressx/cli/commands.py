"""How the tests of the command line run it, and the recipe of the run that they share."""

from __future__ import annotations

from click.testing import CliRunner, Result

from compressx.cli import cli

SECTION = "select_tokens: {selector: gemfilter, keep: 40, options: {block: 1}, protect: {first: 1, last: 5}}\n"
RECIPE = f"""\
model: {{path: model, dtype: float32}}
calibration: {{dataset: {{text: text.txt}}, samples: 4, sequence_length: 32}}
prune:
  - {{targets: ["*.down_proj"], pruner: wanda, sparsity: 0.5}}
  - {{targets: ["*"], pruner: magnitude, pattern: "2:4"}}
evaluate:
  token_perplexity: {{dataset: {{text: text.txt}}, sequence_length: 32, samples: 4}}
{SECTION}output: out
"""
TEXT = "evaluate.token_perplexity={dataset: {text: text.txt}, sequence_length: 32, samples: 4}"


def invoke(*arguments: str, given: str | bytes | None = None) -> Result:
    """Run a command in this process, which is faster; an exception that is no exit is raised."""
    return CliRunner().invoke(cli, list(arguments), input=given, catch_exceptions=False)


def printed(*arguments: str) -> str:
    """Run a command that ends well; returns what it prints."""
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str, given: str | bytes | None = None) -> str:
    """Run a command that is wrong; returns the one message that it ends with."""
    done = invoke(*arguments, given=given)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr
