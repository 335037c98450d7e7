"""The commands, as scripts and as entry points of the package."""
