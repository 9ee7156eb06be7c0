"""What a recipe may say, and where in the file it says it."""
