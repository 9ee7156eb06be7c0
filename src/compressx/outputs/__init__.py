"""What is done with a pruned model and its files afterwards: inspected, measured, masked again, compared."""
