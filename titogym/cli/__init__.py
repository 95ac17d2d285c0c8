"""The `titogym` command: one small module per subcommand, each importing what it needs only when run."""
