"""`python -m compressx_attnprune` is `compressx-attnprune`."""

from compressx_attnprune.cli import main

main()
