"""What one check of the kit says of a pruner that breaks the promise, without the checks before it."""

from __future__ import annotations

import pytest

from compressx import PrunerSpec
from compressx.testing.pruners import PRUNER_CHECKS, plans
from compressx.testing.subject import Subject


def broken_promise(spec: PrunerSpec, check: str, architecture: str) -> str:
    """Return the message that a check ends with."""
    checks = {"plans without weights": plans, **PRUNER_CHECKS}
    with pytest.raises(Exception, match=r".") as found:
        checks[check](Subject(spec, spec.options(), architecture))
    return str(found.value)
