"""`python -m wildflower`, the same as the command `wildflower`."""

from wildflower.command import main

main()
