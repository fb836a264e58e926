"""One module per command; each imports what it needs when the command is called."""
