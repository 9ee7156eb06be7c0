"""A pruner is asked: with its statistics and what it prepares of them, computed when that is first looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compressx.api.patterns import Pattern
from compressx.api.pruner import AnyPruner, Block, PreparingPruner
from compressx.blocks.observe import Observed
from compressx.runtime.errors import blamed_on


def answer_of(
    plugin: str, pruner: AnyPruner, block: Block, patterns: Mapping[str, Pattern], observed: Mapping[str, Observed],
    kept: dict[Observed, Any] | None = None,
) -> Any:  # fmt: skip
    """Call a pruner's `prune`; what it returns is not looked at. Without `kept` one prepared value is held at a time.

    Raises:
        PluginError: any exception of the pruner's that is not for users.
    """
    stats = {name: of.statistic for name, of in observed.items()}
    with blamed_on(f"pruner {plugin!r} failed on {block.fqn}"):
        if isinstance(pruner, PreparingPruner):
            return pruner.prune(block, patterns, stats, Prepared(plugin, pruner, block, observed, kept))
        return pruner.prune(block, patterns, stats)


class Prepared(Mapping[str, Any]):
    """By linear name, what a pruner prepared of the linear's statistic.

    Iterates over linears that share a statistic in turn.

    The arguments are those of `answer_of`.
    """

    def __init__(
        self, plugin: str, pruner: PreparingPruner, block: Block, observed: Mapping[str, Observed],
        kept: dict[Observed, Any] | None = None,
    ) -> None:  # fmt: skip
        self._plugin, self._pruner, self._block = plugin, pruner, block
        order = list(dict.fromkeys(observed.values()))
        self._observed = dict(sorted(observed.items(), key=lambda item: order.index(item[1])))
        self._made, self._keeps = ({}, False) if kept is None else (kept, True)

    def __getitem__(self, name: str) -> Any:
        """Return a value, computed now unless it is kept.

        Raises:
            PluginError: any exception of `prepare`'s that is not for users; the message names plugin and linear.
        """
        of = self._observed[name]
        if of not in self._made:
            if not self._keeps:
                self._made.clear()  # before the next takes as much room
            with blamed_on(f"prepare of pruner {self._plugin!r} failed on {name}"):
                self._made[of] = self._pruner.prepare(self._block, name, of.statistic)
        return self._made[of]

    def __iter__(self) -> Iterator[str]:
        return iter(self._observed)

    def __len__(self) -> int:
        return len(self._observed)
