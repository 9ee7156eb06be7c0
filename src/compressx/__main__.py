"""`python -m compressx`."""

from compressx.cli import main

main()
