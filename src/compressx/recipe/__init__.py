"""What a recipe may say: its schema, YAML with line numbers, and how mistakes are reported."""
