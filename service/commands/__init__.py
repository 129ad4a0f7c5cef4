"""The subcommands of `pageturner`, a file each. Part of the command line: they may read the configuration."""
