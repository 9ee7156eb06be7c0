"""From a recipe to a plan: which rule takes which linear, with which pattern, on which text."""
