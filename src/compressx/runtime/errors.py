"""Every error that compressx raises on purpose.

The command line prints a `CompressxError` as one message and exits with 2; any other exception is a defect and
shows its traceback. Each message says what was wrong, where, what was expected and what to do.
"""

from __future__ import annotations

import contextlib
import difflib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class CompressxError(Exception):
    """An error that the user can mend; its message stands alone, without a traceback."""


class RecipeError(CompressxError):
    """The recipe is wrong. The message begins with `file:line:column`."""


class PluginError(CompressxError):
    """A plugin cannot be loaded, or broke the contract of `compressx.Pruner`. The message names the plugin."""


class UnsupportedModelError(CompressxError):
    """The model cannot be pruned this way. The message says why and what to use instead."""


class CalibrationError(CompressxError):
    """Calibration or evaluation text is missing, too short, or gives statistics that cannot be used."""


class ArtifactError(CompressxError):
    """A file cannot be read, verified or written. The message names the file."""


def did_you_mean(value: str, valid: Iterable[str]) -> str:
    """Say which valid name is nearest to `value`, and list them all when they are few.

    Args:
        value: what the user wrote.
        valid: the names that would have been accepted.

    Returns:
        A clause such as `did you mean 'wanda'? valid: alps, magnitude, wanda`, or the empty string.
    """
    names = sorted(set(valid))
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{nearest(value, names)}valid: {shown}" if names else ""


def nearest(value: str, valid: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Ask whether the nearest valid name is meant, as in `did you mean 'wanda'? `; the empty string when none is near.

    Upper and lower case are alike; `cutoff` is how alike the two have to be, from 0 to 1.
    """
    names = {name.casefold(): name for name in valid}
    close = difflib.get_close_matches(value.casefold(), names, n=1, cutoff=cutoff)
    return f"did you mean {names[close[0]]!r}? " if close else ""


@contextlib.contextmanager
def blamed_on(plugin: str) -> Iterator[None]:
    """Turn what a plugin's own code raises into a `PluginError` that says where it was; errors for users pass.

    Args:
        plugin: what failed, such as `pruner 'mine' failed on model.layers.0`.
    """
    try:
        yield
    except CompressxError:
        raise
    except Exception as error:
        # Two frames are ours, this one and the caller's; of the plugin's the innermost in the folder of the first.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        own = [f for f in frames if Path(f.filename).is_relative_to(Path(frames[0].filename).parent)]
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise PluginError(f"{plugin}: {type(error).__name__}: {error}{place}") from error
