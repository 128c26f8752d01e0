"""The subcommands of `wildflower`."""
