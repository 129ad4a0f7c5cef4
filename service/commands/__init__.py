"""The subcommands of `pageturner`, a file each; flags, output, signals and answer hold what several share.

`service.cli` imports a command when it is asked for; nothing else does. Invariant: a user's mistake is one
line on standard error and exit code 2, and no command imports torch before it needs it.
"""
