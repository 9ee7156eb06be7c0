"""Calibration, training and evaluation text: documents, and sequences of their tokens."""
