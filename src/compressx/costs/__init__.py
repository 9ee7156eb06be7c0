"""What a recipe will cost, counted from shapes before anything runs."""
