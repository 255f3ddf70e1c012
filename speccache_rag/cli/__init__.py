"""The `speccache` command: one module a subcommand, parsing and printing only."""
