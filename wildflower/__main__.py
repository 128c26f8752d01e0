"""`python -m wildflower`, the same as the command `wildflower`."""

from wildflower.cli.command import main

main()
