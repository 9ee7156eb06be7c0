"""The recipe: its schema, YAML with line numbers, and error messages."""
