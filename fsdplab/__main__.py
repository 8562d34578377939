"""`python -m fsdplab`: the command line, where the `fsdplab` script is not on the path."""

from fsdplab.cli import main

main()
